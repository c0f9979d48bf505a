"""The network test between real torchrun nodes of one machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.workspace.processes import free_port
from tests.support.ranks import Ranks, rank_env
from tests.support.repository import REPO
from training.hardware.check_network import sockets_despite_adapters
from training.records.node import CollectiveReport

pytestmark = pytest.mark.slow

NODES = (2, 1, 1)  # ranks of each


def run_nodes(out: Path) -> list[tuple[int, str]]:
    """Exit code and output of each of NODES."""
    port = free_port()
    processes = []
    for rank, ranks in enumerate(NODES):
        options = ["--nnodes", len(NODES), "--node-rank", rank, "--nproc-per-node", ranks]
        options += ["--master-addr", "127.0.0.1", "--master-port", port, "--local-addr", "127.0.0.1"]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *map(str, options),
            "-m",
            "training.hardware.check_network",
            str(out),
        ]
        env = rank_env() | {"SHARDLINE_HOST": f"host{rank}"}
        processes.append(
            subprocess.Popen(command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> CollectiveReport:
    out = tmp_path_factory.mktemp("collective") / "report.json"
    for code, output in run_nodes(out):
        assert code == 0, output
    return CollectiveReport.read(out)


def test_sums_are_exact_and_bandwidth_is_as_nccl_tests_define_it(report: CollectiveReport) -> None:
    assert (report.backend, report.num_ranks, report.wrong_ranks) == ("gloo", sum(NODES), ())
    assert [rate.num_bytes for rate in report.all_reduce] == [2**10, 2**16, 2**20, 2**24][: len(report.all_reduce)]
    for rate in report.all_reduce:
        assert rate.algbw_gb_s == pytest.approx(rate.num_bytes / rate.seconds / 1e9)
        assert rate.busbw_gb_s == pytest.approx(rate.algbw_gb_s * 2 * 3 / 4)
    assert report.seconds < 60


def test_every_two_hosts_are_a_pair_once_the_slowest_first(report: CollectiveReport) -> None:
    assert report.hosts == ("host0", "host1", "host2")
    assert {frozenset(pair.hosts) for pair in report.pairs} == {
        frozenset({"host0", "host1"}),
        frozenset({"host0", "host2"}),
        frozenset({"host1", "host2"}),
    }
    assert len(report.pairs) == 3
    rates = [pair.gb_s for pair in report.pairs]
    assert rates == sorted(rates)
    assert all(pair.gb_s > 0 and 0 < pair.latency_s < 1 for pair in report.pairs)


def test_one_wrong_addend_is_found_and_its_rank_named(tmp_path: Path) -> None:
    """A rank whose memory lost a bit, planted."""
    out = tmp_path / "report.json"
    ranks = Ranks(out, program="tests.programs.wrong_sum", ranks=2)
    assert 1 in ranks.wait(end_others=False)
    assert "all-reduce gave wrong sums on ranks [1]" in ranks.log()
    assert CollectiveReport.read(out).wrong_ranks == (1,)


def test_tcp_between_hosts_that_have_adapters_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank, as NCCL reported it: the second host's went over sockets."""
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    used = [("IB", ["mlx5_0"]), ("Socket", ["mlx5_0", "mlx5_1"]), ("Socket", [])]
    error = sockets_despite_adapters(["a", "b", "c"], used)
    assert error.startswith("NCCL used TCP on hosts that have InfiniBand adapters: b (mlx5_0, mlx5_1).")
    assert "launch.devices" in error
    assert sockets_despite_adapters(["a", "c"], [used[0], used[2]]) == ""
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert sockets_despite_adapters(["a", "b", "c"], used) == ""
