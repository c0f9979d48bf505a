"""Whether a job can work, asked before anything is touched: the command line's first act, and a flow's first step."""

from __future__ import annotations

from tasks.data.sources import check_paths
from tasks.evaluation.checks import check_beside
from tasks.launch import nsight
from tasks.planning.pretrained import check_optimizer, check_start, check_tokenizer, hf_config
from training.config.run import RunConfig


def check_job(config: RunConfig) -> None:
    """Raise ValueError, with the cure, for a corpus, hosts, tools or files that are not there."""
    if config.trainer.given:  # the program finds its own text
        return
    check_inputs(config)
    check_start(config)
    check_beside(config)
    nsight.check_here(config)
    if config.launch.launcher == "docker":
        from tasks.hardware.hosts import read_hosts

        read_hosts(config.launch)
    elif config.launch.launcher == "slurm":
        from tasks.launch.slurm_allocation import require_slurm

        require_slurm()


def check_inputs(config: RunConfig) -> None:
    """Raise ValueError, with the cure, for a corpus, a model, a tokenizer or an optimizer's state that is not there."""
    check_paths(config.data)
    hf_config(config.model)
    check_tokenizer(config)
    check_optimizer(config)
