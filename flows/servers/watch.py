"""`shardline watch`: starts a promotion for each version that gets the alias `challenger`, however it was set.

Where there is a Prefect server, it starts the deployment `promote`, with a key per model and version, so that two such
processes start only one run. Otherwise it starts `shardline promote`, which continues when this process ends.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

import uvicorn

from tasks.promotion.challengers import ChallengerWatcher, DuePromotion
from tasks.promotion.webhook import PATH, build_receiver, read_secret, register_webhook
from tasks.registry.models import require_model
from tasks.tracking.client import registry_client
from tasks.workspace.paths import command, prefect_url, tracking_uri

logger = logging.getLogger(__name__)

DEPLOYMENT = "Promote/promote"
MAX_RUNS = 5  # runs in Prefect for one version, each after one that ended without a verdict


def watch(
    models: Sequence[str], *, poll_s: float, host: str, port: int | None, secret_file: str, register_url: str
) -> None:
    """Watch until SIGTERM or Ctrl-C. Raises ValueError for an unknown model, or for webhooks without a secret."""
    uri = tracking_uri()
    client = registry_client(uri)
    for model in models:
        require_model(client, model)
    if port is not None and not secret_file:
        raise ValueError("--port needs --secret-file: webhooks are checked by their signature")
    secret = read_secret(Path(secret_file)) if secret_file else ""
    if register_url:
        if not secret:
            raise ValueError("--register-webhook needs --secret-file: MLflow signs with it")
        register_webhook(client, url=register_url, secret=secret)
    start = start_in_prefect if prefect_url() else _start_here
    watcher = ChallengerWatcher(tracking_uri=uri, models=models, poll_s=poll_s, start=start)
    stopped = threading.Event()
    thread = threading.Thread(target=watcher.run, args=(stopped,), name="challengers", daemon=True)
    thread.start()
    print(f"watching {', '.join(models) or 'all models'}, every {poll_s:g} s", flush=True)
    try:
        if port is None:
            thread.join()
            return
        app = build_receiver(secret=secret, on_challenger=watcher.notify)
        server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
        print(f"webhooks: http://{host}:{port}{PATH}", flush=True)
        server.run()
    finally:
        stopped.set()


def _start_here(due: DuePromotion) -> Callable[[], bool]:
    """Start `shardline promote` in a session of its own, which a Ctrl-C here does not interrupt."""
    promote = [command("shardline"), "promote", due.model, "--by", f"watch: {due.reason}"]
    process = subprocess.Popen(promote, stdout=subprocess.DEVNULL, start_new_session=True)
    return lambda: process.poll() is None


def start_in_prefect(due: DuePromotion) -> Callable[[], bool]:
    """Start a run of the deployment; without a deployment, promote in a process of this machine."""
    from flows.servers.embedded import start_prefect_server

    start_prefect_server()()
    from prefect.client.schemas.objects import FlowRun
    from prefect.deployments import run_deployment
    from prefect.exceptions import ObjectNotFound

    parameters = {"model": due.model, "by": f"watch: {due.reason}"}
    key = f"promote {due.model}/{due.version}: {due.reason}"
    for _ in range(MAX_RUNS):
        try:
            run = run_deployment(DEPLOYMENT, parameters=parameters, idempotency_key=key, timeout=0, as_subflow=False)
            assert isinstance(run, FlowRun), "a coroutine only in an event loop"
        except ObjectNotFound:
            logger.warning(
                "Prefect has no deployment %s (`shardline deploy` makes it): promoting here instead", DEPLOYMENT
            )
            return _start_here(due)
        if run.state is None or not run.state.is_final():
            run_id = run.id
            return lambda: _is_under_way(run_id)
        key = f"promote {due.model}/{due.version} after {run.id}"  # the earlier run ended without a verdict
    logger.warning(
        "%s/%d has no verdict after %d runs in Prefect: look at their logs", due.model, due.version, MAX_RUNS
    )
    return lambda: False


def _is_under_way(run_id: UUID) -> bool:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
    return state is None or not state.is_final()
