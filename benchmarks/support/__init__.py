"""Parts that several benchmarks use: workloads, races between programs, servers, Docker hosts, published figures."""
