"""A leading rank's end of its socket: it ends with its owner, however that ended."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from training.inference.socket_channel import Channel
from training.records.decoding import CancelRequest, to_line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rest", [b"", b'{"kind":"canc'])
def test_a_channel_is_closed_after_its_owner_was_killed_even_within_a_line(rest: bytes, tmp_path: Path) -> None:
    request = CancelRequest(number=7)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "channel"))
        listener.listen()
        channel = Channel(tmp_path / "channel")
        owner, _ = listener.accept()
        owner.sendall(to_line(request))
        assert channel.receive(wait_s=20) == [request]
        owner.sendall(rest)
        owner.close()
        while not channel.closed:
            assert channel.receive(wait_s=20) == []
    channel.socket.close()
