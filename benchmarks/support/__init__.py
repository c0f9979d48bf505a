"""What several benchmarks share: workloads, races between programs, servers, Docker hosts, published figures."""
