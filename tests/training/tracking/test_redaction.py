"""What may be printed of a log."""

from __future__ import annotations

import pytest

from training.tracking.redaction import without_secrets


def test_secrets_and_a_uris_password_are_hidden_wherever_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("WANDB_API_KEY", "hf_abcdef")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "example")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:pass%21@mlflow.example")
    assert without_secrets("hf_abcdef hf_abc pass! pass%21 https://me:pass%21@mlflow.example/api") == (
        "*** *** *** *** https://***@mlflow.example/api"
    )
    error = "postgresql://ann:t0p@db/x failed: wrong password 't0p' for bob's key k"
    uri = "postgresql://ann:t0p@db/x"
    assert without_secrets(error, more=[uri, ""]) == "*** failed: wrong password '***' for bob's key k"


def test_a_uri_without_credentials_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example:5000")
    assert without_secrets("http://mlflow.example:5000 is away") == "http://mlflow.example:5000 is away"
