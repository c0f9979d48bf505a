"""What of the training image can be told without a daemon: the build's context, names, and what is refused."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from infra import images, install_train
from infra.hosts import HostClient
from infra.install_train import without_torch
from tests.support.made_up_wheel import made_up_wheel


def names(**options: object) -> list[str]:
    file = io.BytesIO()
    images.write_context(file, **options)  # type: ignore[arg-type]
    return tarfile.open(fileobj=io.BytesIO(file.getvalue())).getnames()


def test_the_context_has_what_the_dockerfile_copies_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "torch-2.whl").touch()
    (tmp_path / "certificates.crt").touch()
    found = names(wheels=[tmp_path / "torch-2.whl"], ca=tmp_path / "certificates.crt")
    assert {"pyproject.toml", "infra/train.Dockerfile", "infra/install_train.py", "training/train.py"} <= set(found)
    assert {"extra/torch-2.whl", "extra/ca.pem"} <= set(found)
    assert {name.split("/")[0] for name in names()} == {
        *images.PACKAGES,
        "pyproject.toml",
        "README.md",
    }


def test_equal_files_make_an_equal_context_so_that_docker_finds_its_layers_again(tmp_path: Path) -> None:
    contexts = []
    for _ in range(2):
        file = io.BytesIO()
        (tmp_path / "ca.pem").unlink(missing_ok=True)
        (tmp_path / "ca.pem").write_text("the same, at another time")
        images.write_context(file, ca=tmp_path / "ca.pem")
        contexts.append(file.getvalue())
    assert contexts[0] == contexts[1]


def test_a_folder_without_the_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no infra/train.Dockerfile.*build the image from a checkout"):
        names(root=tmp_path)


@pytest.mark.parametrize("name", ["shardline-train", "someone/shardline"])
def test_a_name_without_a_registry_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ValueError, match=f"names no registry: .* registry.example:5000/{name}"):
        images.split_name(name)


def test_a_port_is_no_version() -> None:
    assert images.split_name("localhost:5000/a/b:1") == ("localhost:5000/a/b", "1")
    assert images.split_name("localhost:5000/a/b") == ("localhost:5000/a/b", "latest")


def test_a_password_never_gets_into_an_image() -> None:
    client = HostClient.__new__(HostClient)  # refused before it is used
    with pytest.raises(ValueError, match="PIP_INDEX_URL contains a password, which `docker history` shows") as refusal:
        images.build(client, tag="x", build_args={"PIP_INDEX_URL": "https://me:s3cret@index.example/simple"})
    assert "s3cret" not in str(refusal.value)


def test_a_base_images_own_torch_stands_in_for_ours_unless_it_is_too_old() -> None:
    requirements = ["pydantic>=2.10", "torch>=2.11", "transformers>=5.0"]
    assert without_torch(requirements, torch="2.13.0a0+nv26.06") == ["pydantic>=2.10", "transformers>=5.0"]
    with pytest.raises(SystemExit, match=r"the base image has torch 2.9.1\+cu130, Shardline needs torch>=2.11"):
        without_torch(requirements, torch="2.9.1+cu130")


@pytest.mark.slow
def test_what_a_base_image_pins_for_its_own_packages_does_not_bind_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's images set PIP_CONSTRAINT; pip would refuse what Shardline needs."""
    made_up_wheel(tmp_path, version="2.0", code="VERSION = 2\n")
    python = tmp_path / "target" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(install_train, "TARGET", tmp_path / "target")
    (tmp_path / "constraint.txt").write_text("made-up==1.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraint.txt"))
    site = tmp_path / "target" / "site"
    install_train._pip("--no-index", "--find-links", str(tmp_path), "--target", str(site), "made-up")
    assert (site / "made_up.py").exists()
