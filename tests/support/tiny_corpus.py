"""Small corpora for the tests of tokenization: text in, shards, and the text back out of them."""

import contextlib
import functools
import http.server
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tasks.data.corpus import prepare_corpus
from tasks.data.estimate import estimate_text
from tasks.planning.text import TextEstimate
from training.config.run import DataConfig, RunConfig
from training.records.token_shards import TokenShards
from training.shards.format import SPLITS
from training.shards.stream import TokenStream

POEM = "秦川雄帝宅，函谷壯皇居。\n綺殿千尋起，離宮百雉餘。"
CODE = "def f(x):\n    if x:\n\treturn  \"a b\"   # tail  \n\n\n    return '\\n'\r\n"
EMOJI = "Zoë 👩‍🚀 naïve\u00a0— ½ €\n"
DOCUMENTS = [f"Document {number}. {text}" for number, text in enumerate([POEM, CODE, EMOJI, "plain words "] * 6)]


def prepare(
    tmp_path: Path, path: Path | str, *, objective: Any = "causal", kind: str = "bytes", **fields: Any
) -> tuple[Path, TokenShards]:
    tokenizer = fields.pop("tokenizer", {}) | {"kind": kind}
    data = DataConfig.model_validate({"path": str(path), "tokenizer": tokenizer} | fields)
    return prepare_corpus(data, tokens_home=tmp_path / "tokens", objective=objective)


def assert_read(documents: Iterable[str], *corpus: Any, **fields: Any) -> TokenShards:
    """Tokenizes a corpus, which must hold these documents in any order."""
    folder, shards = prepare(*corpus, **fields)
    assert sorted(all_documents(folder)) == sorted(documents)
    return shards


def assert_refused(match: str, *corpus: Any, **fields: Any) -> None:
    with pytest.raises(ValueError, match=match):
        prepare(*corpus, **fields)


def estimated(data: Mapping[str, Any], **sections: Any) -> TextEstimate:
    """Returns what a plan says of a corpus before it is tokenized, by bytes unless `data` names a tokenizer."""
    found = estimate_text(RunConfig.model_validate({"data": {"tokenizer": {"kind": "bytes"}, **data}} | sections))
    assert found is not None
    return found


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Writes a corpus of files, by their names below the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@contextlib.contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Serves the files of a folder; without ranges, as Python's server has none. Yields its URL."""
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def decoded(folder: Path) -> dict[str, list[str]]:
    """The documents of each split, by way of shards, reader and saved tokenizer; end tokens left out."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    documents: dict[str, list[str]] = {}
    for split in SPLITS:
        stream = TokenStream(folder, split)
        tokens, bounds = stream.read(0, len(stream)), stream.document_bounds().tolist()
        documents[split] = [
            tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=True)
            for start, stop in itertools.pairwise(bounds)
        ]
    return documents


def write_json_lines(path: Path, documents: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, "text": text}, ensure_ascii=False) + "\n" for i, text in enumerate(documents))
    )
    return path


def all_documents(folder: Path) -> list[str]:
    documents = decoded(folder)
    return documents["train"] + documents["validation"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files below, by relative name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
