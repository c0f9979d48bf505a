"""The code of a registered model version, which `mlflow models serve` and `mlflow.pyfunc.load_model` run.

MLflow copies this file into each version and runs it when the version is loaded. So, unlike other files here, it acts
on import: it calls `set_model`. It imports no Shardline package: the generator and the encoder of the version's
registration lie beside it, and two versions with different ones can be loaded into one process.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext

ENCODER = "training.tokenizer.text_encoder"  # as the generator imports it


def _load(name: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there, and the generator its encoder
    spec.loader.exec_module(module)
    return module


class RegisteredText(PythonModel):
    """Takes a column `prompt`, returns the text that follows each prompt."""

    def load_context(self, context: PythonModelContext) -> None:
        before = sys.modules.get(ENCODER)
        try:
            _load(ENCODER, context.artifacts["encoder"])
            module = _load("generate_of_this_version", context.artifacts["generator"])
        finally:
            sys.modules.pop(ENCODER, None)
            if before:  # of Shardline, or of another version
                sys.modules[ENCODER] = before
        self.generator = module.TextGenerator(context.artifacts["export"])

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> list[str]:
        """Return a text for each row. Raises MlflowException, which MLflow's server answers with 400, for bad input."""
        sampling = params or {}
        if unset := [name for name, value in sampling.items() if value is None]:
            raise _refused(f"params: {unset[0]} has no value: leave it out to use its default, or give a number")
        prompts = list(model_input["prompt"])
        for row, prompt in enumerate(prompts):
            if not isinstance(prompt, str):  # MLflow lets missing values, bytes and lists pass as text
                raise _refused(
                    f"row {row} of the column prompt is {prompt!r:.80}, which is not text: give a string there (the "
                    "empty string begins a new document), or leave the row out"
                )
        try:
            return [self.generator.generate(prompt, **sampling) for prompt in prompts]
        except ValueError as error:  # parameters out of range, characters that the tokenizer lacks
            raise _refused(str(error)) from error


def _refused(why: str) -> MlflowException:
    return MlflowException.invalid_parameter_value(why)


mlflow.models.set_model(RegisteredText())
