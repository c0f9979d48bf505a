"""A certificate authority, a daemon's certificate and a client's, by openssl; 10 ms each."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

CONFIG = """
[req]
distinguished_name = name
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectAltName = DNS:localhost,IP:127.0.0.1{alternatives}
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


def make_authority(folder: Path) -> None:
    """FOLDER/ca.pem and ca-key.pem."""
    folder.mkdir(parents=True)
    _certificate(folder, "ca", extensions="authority")


def make_certificate(
    folder: Path, *, authority: Path, addresses: Sequence[str] = (), names: Sequence[str] = ()
) -> None:
    """FOLDER/cert.pem, key.pem, and the authority's ca.pem: what Docker's client and daemon look for."""
    folder.mkdir(parents=True, exist_ok=True)
    signer = ["-CA", str(authority / "ca.pem"), "-CAkey", str(authority / "ca-key.pem")]
    alternatives = [*(f"IP:{address}" for address in addresses), *(f"DNS:{name}" for name in names)]
    _certificate(folder, "cert", extensions="leaf", alternatives=alternatives, signer=signer)
    (folder / "ca.pem").write_bytes((authority / "ca.pem").read_bytes())


def _certificate(
    folder: Path, name: str, *, extensions: str, alternatives: Sequence[str] = (), signer: list[str] | None = None
) -> None:
    config = folder / f"{name}.cnf"
    config.write_text(CONFIG.format(alternatives="".join(f",{each}" for each in alternatives)))
    key = folder / ("key.pem" if name == "cert" else f"{name}-key.pem")
    command = ["openssl", "req", "-x509", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-config", str(config), "-extensions", extensions, "-days", "3", "-subj", f"/CN=shardline rig {name}"]
    command += ["-keyout", str(key), "-out", str(folder / f"{name}.pem"), *(signer or [])]
    subprocess.run(command, check=True, capture_output=True)
