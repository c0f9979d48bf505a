"""The decorator of Shardline's flows: Prefect's `flow` with the error handling that each of them needs."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.states import Cancelled
from prefect.utilities.callables import get_call_parameters
from prefect.utilities.hashing import file_hash
from rich.console import Console

from flows.prefect_ui.deployment import whole_parameters
from flows.prefect_ui.events import report_failure
from flows.servers.embedded import NOTICED_WITHIN_S, is_gone
from tasks.runs.errors import RunStopped
from tasks.workspace.paths import keep_password_apart
from tasks.workspace.processes import process_key
from training.config.credentials import without_url_credentials

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PROCESS = "shardline.process"  # label of a flow run: the process that runs it, so that others can tell whether it lives
START = "shardline.start"  # label of a flow run: which of its starts, from 1, that process is for
_outcomes: ContextVar[list[Future[Any]]] = ContextVar("outcomes")  # of the flow's function; the last call counts


def shardline_flow(name: str, *, run_name: str | Callable[[], str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A Prefect flow. A RunStopped inside it ends it as Cancelled in Prefect, and is raised again to its caller. The
    caller gets the function's own result or error even if Prefect does not answer any more.

    Any other error is reported to Prefect's automations by the outermost flow, so that one failure is one message.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def cancelled_if_stopped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return _kept(function, *args, **kwargs)
            except RunStopped as stop:
                return cast(R, Cancelled(message=str(stop)))
            except Exception as error:
                context = FlowRunContext.get()
                if context and context.flow_run and context.flow_run.parent_task_run_id is None:
                    report_failure(context.flow_run.id, error)
                raise

        # Prefect validates parameters by this signature. If its types were text, Prefect could not resolve them here.
        cancelled_if_stopped.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
        made = StoppableFlow(
            cancelled_if_stopped,
            name=name,
            version=file_hash(str(inspect.getsourcefile(function))),  # otherwise Prefect takes this file
            flow_run_name=run_name,
            on_running=[prepare_process],
            validate_parameters=True,
        )
        return cast(Callable[P, R], made)

    return decorate


def _kept(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a flow's function, and keep its result or error for StoppableFlow, whatever Prefect makes of it."""
    outcome: Future[R] = Future()
    _outcomes.get([]).append(outcome)
    try:
        outcome.set_result(function(*args, **kwargs))
    except BaseException as error:
        outcome.set_exception(error)
    return outcome.result()


class StoppableFlow(Flow[P, R]):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.validate_parameters(get_call_parameters(self.fn, args, kwargs))  # before Prefect stores them
        if is_gone():
            return inspect.unwrap(self.fn)(*args, **kwargs)
        outcomes = list[Future[Any]]()
        reset = _outcomes.set(outcomes)
        try:
            return super().__call__(*args, **kwargs)
        except CancelledRun as stop:
            raise RunStopped(str(stop)) from None
        except Exception as error:
            if outcomes and outcomes[-1].exception() is error:
                raise
            if not is_gone(within_s=NOTICED_WITHIN_S):
                if not outcomes:
                    raise
                said = "could not report to Prefect how the flow ended (%s): the next run or `shardline reconcile` will"
                logger.warning(said, error)
        finally:
            _outcomes.reset(reset)
        try:
            return outcomes[-1].result() if outcomes else inspect.unwrap(self.fn)(*args, **kwargs)
        except TerminationSignal:  # SIGTERM, which Prefect would send again to the command's own handler
            raise KeyboardInterrupt from None

    def validate_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Does what Prefect does, for a whole config; it logs parameters that it refuses: here without credentials."""
        logger = logging.getLogger("prefect.flows")
        logger.addFilter(_hide_credentials)
        try:
            return super().validate_parameters(whole_parameters(parameters))
        finally:
            logger.removeFilter(_hide_credentials)


def _hide_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_url_credentials(record.getMessage()), None
    return True


def prepare_process(flow: Any, flow_run: Any, state: Any) -> None:
    """Label the flow run with its process, and prepare that. Prefect logs an error in here, and the run continues.

    Prefect sends our loggers' lines to the run's page, from the level that they have: WARNING, unless it is set.
    """
    for room in map(logging.getLogger, ("flows", "tasks")):
        if room.level == logging.NOTSET:
            room.setLevel(logging.INFO)
    for prefect in map(logging.getLogger, ("prefect.flow_runs", "prefect.engine")):
        prefect.addFilter(_is_no_cancel)
    keep_password_apart()
    Console.on_broken_pipe = _mute  # type: ignore[method-assign, assignment]
    with get_client(sync_client=True) as client:
        start = client.read_flow_run(flow_run.id).run_count
        client.update_flow_run_labels(flow_run.id, {PROCESS: process_key(os.getpid()), START: start})


def _is_no_cancel(record: logging.LogRecord) -> bool:
    """Leave out the tracebacks that Prefect logs, twice, for a flow run that ended as Cancelled."""
    return not (record.exc_info and isinstance(record.exc_info[1], CancelledRun))


def _mute(console: Console) -> None:
    """Discard all further output: if the worker that reads it was killed, rich would end this process."""
    console.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
