"""`bertrain serve` in a process of its own: its answers, what it refuses, many clients, vanished clients, signals."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bertrain
from bertrain.cli.options import printed_json
from bertrain.serving.operations import NEAREST
from bertrain.serving.requests import MAX_BODY, MAX_CHARACTERS, MAX_TEXTS, parse
from bertrain.training.finetuned import FineTuned
from bertrain.weights.export import export
from tests import helpers
from tests.miniature_tasks import coloured, command_line
from tests.served import Models, Server, make_models, started

TEXTS = coloured(5, seed=9)[0]
MASKED = ["bato [MASK] kese", "[MASK] [MASK] livi moda nufu", "rago [MASK]"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: Models) -> Any:
    with started("serve", *models.all, num_addresses=7) as running:
        yield running


def printed(capsys: pytest.CaptureFixture[str], result: Any) -> Any:
    """A result as `--json` prints it."""
    capsys.readouterr()
    printed_json(result, True)
    return json.loads(capsys.readouterr().out)


# --- answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["classify", "number", "labels", "tag"])
def test_answers_are_those_of_predict(server: Server, models: Models, name: str) -> None:
    run = getattr(models, name)
    expected = json.loads(command_line("predict", run, *TEXTS, "--json").out)
    assert server.answers(f"/{name}/predict", {"texts": TEXTS}) == expected
    assert len(expected) == len(TEXTS)


def test_answers_are_those_of_fill_mask(server: Server, models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    expected = printed(capsys, bertrain.fill_mask(models.fill, MASKED, top=3))
    assert server.answers("/base/fill-mask", {"texts": MASKED, "top": 3}) == expected
    assert [len(masks) for masks in expected] == [1, 2, 1]


def test_answers_are_those_of_predicted_files(server: Server, models: Models, tmp_path: Path) -> None:
    """Of SQuAD; in one request, as in one file. The places of candidates are places in the context."""
    content = json.loads((models.data / "questions" / "dev-v1.1.json").read_text())
    paragraphs = content["data"][0]["paragraphs"][:20]
    content["data"][0]["paragraphs"] = paragraphs
    (tmp_path / "some.json").write_text(json.dumps(content))
    bertrain.predict(models.span, tmp_path / "some.json", tmp_path / "out")
    best, several = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in (
        "predictions", "nbest_predictions"))  # fmt: skip
    asked = [{"question": one["qas"][0]["question"], "context": one["context"]} for one in paragraphs]
    answers = server.answers("/span/answer", {"questions": asked})
    assert [one["answer"] for one in answers] == list(best.values())
    for answer, expected, question in zip(answers, several.values(), asked, strict=True):
        places = [question["context"][one.pop("start") : one.pop("end")] for one in answer["candidates"]]
        assert answer["candidates"] == expected
        assert places == [one["text"] for one in expected]


def test_answers_are_those_of_embed(server: Server, models: Models) -> None:
    expected: Any = bertrain.embed(models.embed, TEXTS)
    assert server.answers("/embed/embed", {"texts": TEXTS}) == expected.tolist()
    nearest = server.answers("/embed/nearest", {"query": TEXTS[0], "texts": TEXTS[1:], "top": 2})
    cosines = expected[1:] @ expected[0]
    assert [one["index"] for one in nearest] == np.argsort(-cosines)[:2].tolist()
    assert [one["text"] for one in nearest] == [TEXTS[1 + one["index"]] for one in nearest]
    assert nearest[0]["similarity"] == pytest.approx(cosines.max(), abs=1e-6)


def test_pairs_and_weights_of_other_formats(models: Models, tmp_path: Path) -> None:
    """Two folders of one name; an exported model; an encoder of sentence-transformers; a task of pairs."""
    table = tmp_path / "data"
    table.mkdir()
    rows = [f"{text},{text},{label}\n" for text, label in zip(*coloured(60, 1), strict=True)]
    (table / "train.csv").write_text("a,b,label\n" + "".join(rows))
    words = ["--task.text", "a", "--task.text_pair", "b", "--data.max_seq_length", "48", "--max-steps", "3"]
    command_line("finetune", "classify", "--data", table, "--run", tmp_path / "base", "--init", models.fill, *words)
    export(models.fill, tmp_path / "weights" / "base")
    export(models.embed, tmp_path / "docs")
    sources = [tmp_path / "base", tmp_path / "weights" / "base", tmp_path / "docs"]
    with started("serve", *sources, num_addresses=3) as server:
        assert [address.removeprefix(server.root) for address in server.addresses] == ["/base/", "/base-2/", "/docs-2/"]
        pairs = [TEXTS[:2], TEXTS[2:4]]
        expected = json.loads(command_line("predict", tmp_path / "base", *TEXTS[:4], "--json").out)
        assert server.answers("/base/predict", {"pairs": pairs}) == expected
        assert server.refused("/base/predict", {"pairs": [["only one"]]}) == (422, "wrong-field")
        assert len(server.answers("/base-2/fill-mask", {"texts": MASKED})) == 3
        assert len(server.answers("/docs-2/embed", {"texts": TEXTS})[0]) == 32
        assert server.request("/")[0] == 200
        code, _ = server.stop(signal.SIGINT)
        assert code == 0


FINE_TUNED = ("classify", "number", "labels", "tag", "span")


@pytest.fixture(scope="module")
def exported(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of every fine-tuned run."""
    folder = tmp_path_factory.mktemp("exported")
    for name in FINE_TUNED:
        export(getattr(models, name), folder / name)
    return folder


def test_exported_weights_answer_as_their_run_does(server: Server, models: Models, exported: Path) -> None:
    """Served, and by `predict` and `evaluate`; also what Transformers' config has no field for."""
    asked = {"questions": [{"question": "bato bato", "context": text} for text in TEXTS]}
    with started("serve", *(exported / name for name in FINE_TUNED), num_addresses=5) as served:
        for name in FINE_TUNED:
            operation, body = ("answer", asked) if name == "span" else ("predict", {"texts": TEXTS})
            found = served.answers(f"/{name}/{operation}", body)
            assert found == server.answers(f"/{name}/{operation}", body), name
        assert served.refused("/classify/predict", {"texts": ["bato " * 31]}) == (413, "text-too-long")
        question = {"questions": [{"question": "bato " * 9, "context": "livi"}]}
        assert served.refused("/span/answer", question) == (413, "text-too-long")
    for name, held_out in (("classify", "table/dev.csv"), ("labels", "label_sets/dev.jsonl")):
        run, weights = getattr(models, name), exported / name
        assert bertrain.predict(weights, texts=TEXTS) == bertrain.predict(run, texts=TEXTS)
        shown = json.loads(command_line("evaluate", weights, "--data", models.data / held_out, "--json").out)
        of_run = json.loads(command_line("evaluate", run, "--data", models.data / held_out, "--json").out)
        assert {key: value for key, value in shown.items() if "_per_s" not in key and "latency" not in key} == {
            key: value for key, value in of_run.items() if "_per_s" not in key and "latency" not in key
        }
    assert "[missing-option]" in command_line("evaluate", exported / "classify", check=False).err
    # Transformers keeps our field; where it has trained another head since, that field says nothing any more.
    config = json.loads((exported / "classify" / "config.json").read_text())
    assert FineTuned.open(exported / "classify").settings.data.max_seq_length == 32
    stale = config | {"bertrain": config["bertrain"] | {"model.head": "regress"}}
    (exported / "classify" / "config.json").write_text(json.dumps(stale))
    assert FineTuned.open(exported / "classify").settings.data.max_seq_length == 64


LABELS = {0: "red", 1: "green", 2: "blue"}
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "class": ("SequenceClassification", {"id2label": LABELS}),
    "classes": ("SequenceClassification", {"id2label": LABELS, "problem_type": "multi_label_classification"}),
    "number": ("SequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "words": ("TokenClassification", {"id2label": {0: "NOUN", 1: "VERB"}}),
    "answers": ("QuestionAnswering", {}),
}


def write_with_transformers(folder: Path, kind: str, models: Models) -> tuple[Any, Any]:
    """A small model of Transformers and its tokenizer, saved by themselves."""
    transformers = pytest.importorskip("transformers")
    head, fields = WRITTEN[kind]
    words = (models.fill / "vocab.txt").read_text().split()
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.3, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"BertFor{head}")(config).eval()
    tokenizer = transformers.BertTokenizerFast(vocab=str(models.fill / "vocab.txt"), do_lower_case=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@pytest.fixture(scope="module")
def written(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, Any]]]:
    """A server of models that Transformers wrote, and these with their tokenizers."""
    folder = tmp_path_factory.mktemp("written")
    made = {kind: write_with_transformers(folder / kind, kind, models) for kind in WRITTEN}
    with started("serve", *(folder / kind for kind in made), num_addresses=len(made)) as running:
        yield running, made


@pytest.mark.parametrize("kind", WRITTEN)
def test_weights_that_transformers_wrote_answer_as_there(kind: str, written: tuple[Server, dict[str, Any]]) -> None:
    server, (model, tokenizer) = written[0], written[1][kind]
    context = " ".join(TEXTS)
    given = ([TEXTS[0]], [context]) if kind == "answers" else (TEXTS,)
    read = tokenizer(*given, padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**read)
    if kind == "answers":
        (found,) = server.answers(f"/{kind}/answer", {"questions": [{"question": TEXTS[0], "context": context}]})
    else:
        found = server.answers(f"/{kind}/predict", {"texts": TEXTS})
    if kind == "answers":
        for one in found["candidates"]:
            first, last = (read.char_to_token(0, place, 1) for place in (one["start"], one["end"] - 1))
            logits = theirs.start_logits[0, first], theirs.end_logits[0, last]
            assert [one["start_logit"], one["end_logit"]] == pytest.approx([*map(float, logits)], abs=1e-5)
    elif kind == "words":
        shares, tags = theirs.logits.softmax(-1).max(-1)
        for row, text in enumerate(TEXTS):
            places = [read.word_to_tokens(row, word).start for word in range(len(text.split()))]
            assert [one["label"] for one in found[row]["entities"]] == [
                model.config.id2label[int(tags[row, place])] for place in places
            ]
            scores = [one["score"] for one in found[row]["entities"]]
            assert scores == pytest.approx([float(shares[row, place]) for place in places], abs=1e-5)
    elif kind == "number":
        assert [one["number"] for one in found] == pytest.approx(theirs.logits[:, 0].tolist(), abs=1e-5)
    else:
        shares = theirs.logits.sigmoid() if kind == "classes" else theirs.logits.softmax(-1)
        assert list(found[0]["probabilities"]) == list(LABELS.values())
        for one, expected in zip(found, shares.tolist(), strict=True):
            assert list(one["probabilities"].values()) == pytest.approx(expected, abs=1e-5)
            likely = [label for label, share in zip(LABELS.values(), expected, strict=True) if share >= 0.5]
            assert kind == "class" or one["labels"] == likely


def test_settings_say_what_transformers_weights_do_not(models: Models, tmp_path: Path) -> None:
    """That they read pairs of texts, and that a question may have no answer."""
    model, tokenizer = write_with_transformers(tmp_path / "class", "class", models)
    write_with_transformers(tmp_path / "answers", "answers", models)
    pairs = [TEXTS[:2], TEXTS[2:4]]
    with torch.no_grad():
        theirs = model(**tokenizer(pairs, padding=True, return_tensors="pt")).logits.softmax(-1)
    with started("serve", tmp_path / "class", "--task.text_pair", "second") as server:
        found = server.answers("/class/predict", {"pairs": pairs})
        assert "The second text" in server.request("/class/")[1]
    assert [[*one["probabilities"].values()] for one in found] == [
        pytest.approx(one, abs=1e-5) for one in theirs.tolist()
    ]
    with started("serve", tmp_path / "answers", "--task.name", "squad/v2.0") as server:
        (found,) = server.answers("/answers/answer", {"questions": [{"question": TEXTS[0], "context": TEXTS[1]}]})
    assert "" in [one["text"] for one in found["candidates"]]
    for source, code in ((models.fill, "option-without-effect"), (models.classify, "fixed-setting")):
        ended = command_line("serve", source, "--port", 0, "--task.name", "squad/v2.0", check=False)
        assert ended.code == 2
        assert f"[{code}]" in ended.err


def test_weights_that_do_not_say_enough_are_refused(models: Models, tmp_path: Path) -> None:
    write_with_transformers(tmp_path / "class", "class", models)
    config = json.loads((tmp_path / "class" / "config.json").read_text())
    tokenizers = [path for path in (tmp_path / "class").iterdir() if path.name.startswith(("tokenizer", "vocab"))]
    assert tokenizers
    cases: dict[str, dict[str, Any]] = {
        "no labels": {"id2label": None, "num_labels": 3},
        "a label twice": {"id2label": {"0": "red", "1": "red", "2": "blue"}},
    }
    for changes in cases.values():
        (tmp_path / "class" / "config.json").write_text(json.dumps(config | changes))
        for words in (("serve", tmp_path / "class", "--port", 0), ("predict", tmp_path / "class", "bato")):
            ended = command_line(*words, check=False)
            assert (ended.code, "[missing-labels]" in ended.err) == (2, True), ended.err
    (tmp_path / "class" / "config.json").write_text(json.dumps(config))
    for path in tokenizers:
        path.unlink()
    ended = command_line("serve", tmp_path / "class", "--port", 0, check=False)
    assert (ended.code, "[missing-vocabulary]" in ended.err) == (2, True), ended.err


# --- refusals ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Any, tuple[int, str]]] = {
    "no JSON": ("classify/predict", b"{texts: 1}", (400, "malformed-body")),
    "not UTF-8": ("classify/predict", b'{"texts": ["\xff"]}', (400, "malformed-body")),
    "nested too deeply": ("classify/predict", b"[" * 100_000, (400, "malformed-body")),
    "no object": ("classify/predict", ["bato"], (400, "malformed-body")),
    "nothing": ("classify/predict", b"", (400, "malformed-body")),
    "no texts": ("classify/predict", {}, (422, "wrong-field")),
    "another type": ("classify/predict", {"texts": "bato"}, (422, "wrong-field")),
    "a number among texts": ("classify/predict", {"texts": ["bato", 1]}, (422, "wrong-field")),
    "an unknown field": ("classify/predict", {"text": ["bato"]}, (422, "unknown-field")),
    "an empty list": ("classify/predict", {"texts": []}, (422, "wrong-number-of-texts")),
    "too many texts": ("classify/predict", {"texts": ["bato"] * (MAX_TEXTS + 1)}, (422, "wrong-number-of-texts")),
    "an empty text": ("classify/predict", {"texts": ["bato", " \n\u200b"]}, (422, "empty-text")),
    "a lone surrogate": ("classify/predict", {"texts": ["bato \ud800"]}, (422, "bad-text")),
    "too many characters": ("tag/predict", {"texts": ["b" * (MAX_CHARACTERS + 1)]}, (413, "text-too-long")),
    "too many tokens": ("classify/predict", {"texts": ["bato " * 31]}, (413, "text-too-long")),
    "too many to embed": ("embed/embed", {"texts": ["bato " * 31]}, (413, "text-too-long")),
    "too many tokens and masks": ("base/fill-mask", {"texts": ["[MASK] " * 63]}, (413, "sentence-too-long")),
    "a long question": (
        "span/answer", {"questions": [{"question": "bato " * 9, "context": "livi"}]}, (413, "text-too-long")
    ),
    "no mask": ("base/fill-mask", {"texts": ["bato"]}, (422, "no-mask")),
    "no guesses": ("base/fill-mask", {"texts": ["[MASK]"], "top": 0}, (422, "wrong-field")),
    "too many guesses": ("base/fill-mask", {"texts": ["[MASK]"], "top": 101}, (422, "wrong-field")),
    "too many masks": ("base/fill-mask", {"texts": ["[MASK]"] * 501, "top": 100}, (422, "too-many-masks")),
    "no context": ("span/answer", {"questions": [{"question": "bato"}]}, (422, "wrong-field")),
    "no query": ("embed/nearest", {"texts": ["bato"]}, (422, "wrong-field")),
    "a large body": ("classify/predict", {"texts": ["bato"], "more": "x" * MAX_BODY}, (413, "body-too-large")),
    "a huge body": ("classify/predict", b" " * (20 * MAX_BODY), (413, "body-too-large")),
    "another operation": ("classify/fill-mask", {"texts": ["bato"]}, (404, "unknown-path")),
    "another model": ("none/predict", {"texts": ["bato"]}, (404, "unknown-path")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(server: Server, case: str) -> None:
    path, body, expected = REFUSED[case]
    assert server.refused(f"/{path}", body) == expected


def test_a_query_is_named_apart_from_the_texts() -> None:
    for query, text, named in ((" ", "bato", "the query is empty"), ("bato", " ", "text 1 is empty")):
        with helpers.refused("empty-text", named):
            parse(NEAREST, json.dumps({"query": query, "texts": [text]}).encode())


def test_other_methods_and_types_are_refused(server: Server) -> None:
    assert server.refused("/classify/predict", None, method="GET") == (405, "wrong-method")
    plain = {"Content-Type": "text/plain"}  # what a form on any web page can send
    assert server.refused("/classify/predict", {"texts": ["bato"]}, headers=plain) == (415, "not-json")


def test_long_texts_are_truncated_if_asked_to(server: Server, models: Models) -> None:
    long = "bato " * 31
    expected = json.loads(command_line("predict", models.classify, long, "--json").out)
    assert server.answers("/classify/predict", {"texts": [long], "truncate": True}) == expected
    assert len(server.answers("/classify/predict", {"texts": ["bato " * 30]})) == 1
    assert server.answers("/tag/predict", {"texts": [long]})[0]["text"] == long


def test_every_path_is_described(server: Server) -> None:
    """The examples of the description are answered, and the page for people has no address elsewhere."""
    status, described = server.request("/openapi.json")
    assert status == 200
    assert described["openapi"] == "3.1.0"
    assert len(described["paths"]) == 8
    page = server.request("/docs")[1]
    for path, methods in described["paths"].items():
        assert path in page
        body = methods["post"]["requestBody"]["content"]["application/json"]
        schema, example = body["schema"], body["example"]
        assert set(schema["required"]) <= set(example) <= set(schema["properties"])
        status, content = server.request(path, example)
        assert status == 200, content
        shown = methods["post"]["responses"]["200"]["content"]["application/json"]["example"]
        assert keys_of(content["answers"][0]) == keys_of(shown["answers"][0])
    for text in (page, server.request("/classify/")[1], server.request("/")[1]):
        assert not [word for word in ("https://", "//cdn", "src=", "@import", "url(") if word in text]


def keys_of(answer: Any) -> Any:
    """The fields of an answer; of lists, those of the first; labels and words do not count."""
    if isinstance(answer, list):
        return [keys_of(answer[0])] if answer else []
    if isinstance(answer, dict):
        return {
            name: name == "probabilities" or keys_of(one) if isinstance(one, dict) else 0
            for name, one in answer.items()
        }
    return 0


# --- many clients, vanished clients, signals ---------------------------------------------------------


async def post(port: int, path: str, body: bytes, *, vanish_after: int | None = None) -> bytes:
    """The response to a request of its own connection; a client may vanish after some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    writer.write(request[:vanish_after])
    await writer.drain()
    if vanish_after is not None:
        writer.transport.abort()
        return b""
    response = await reader.read()
    writer.close()
    return response


def test_a_thousand_clients_at_once(server: Server, models: Models) -> None:
    """All are answered, and as if alone but for the last digits, since bins are shared; a fifth of others vanish."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, most)), most))
    texts = coloured(1000, seed=5)[0]
    bodies = [json.dumps({"texts": [text]}).encode() for text in texts]
    bodies[500] = json.dumps({"texts": ["bato " * 40]}).encode()  # refused, and nobody else is
    port = int(server.root.rpartition(":")[2])

    async def all_at_once() -> list[bytes]:
        gone = [post(port, "/classify/predict", body, vanish_after=140 + 2 * n) for n, body in enumerate(bodies[:100])]
        gone += [post(port, "/classify/predict", body, vanish_after=1 << 20) for body in bodies[100:200]]
        kept = [post(port, "/classify/predict", body) for body in bodies]
        return (await asyncio.gather(*gone, *kept))[len(gone) :]

    responses = asyncio.run(all_at_once())
    assert b" 413 " in responses.pop(500).splitlines()[0]
    texts.pop(500)
    expected = bertrain.predict(models.classify, texts=texts)
    for response, alone in zip(responses, expected, strict=True):
        assert response.startswith(b"HTTP/1.1 200"), response[:200]
        (answer,) = json.loads(response.partition(b"\r\n\r\n")[2])["answers"]
        assert answer["label"] == alone["label"]
        assert answer["probabilities"] == pytest.approx(alone["probabilities"], abs=2e-6)
    assert server.request("/health")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_requests_in_flight_are_answered_when_the_server_is_stopped(models: Models, number: signal.Signals) -> None:
    with started("serve", models.classify) as server:
        connection = server.connect()
        body = json.dumps({"texts": TEXTS}).encode()
        connection.putrequest("POST", "/classify/predict")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:10])
        assert server.request("/health")[0] == 200  # so the first one has been accepted, too
        server.process.send_signal(number)
        while is_listening(server):
            pass
        connection.send(body[10:])
        response = connection.getresponse()
        assert response.status == 200
        assert len(json.loads(response.read())["answers"]) == len(TEXTS)
        _, err = server.process.communicate(timeout=60)
        assert server.process.returncode == 0
        assert "Traceback" not in err


def is_listening(server: Server) -> bool:
    connection = server.connect()
    try:
        connection.connect()
    except ConnectionError:  # refused, or reset while the server closes its socket
        return False
    finally:
        connection.close()
    return True


def test_a_port_in_use_is_refused_before_anything_is_read(models: Models) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = helpers.bertrain("serve", models.classify, "--port", port, check=False)
        assert done.returncode == 2
        assert done.stderr.splitlines() == [
            f"bertrain: port {port} of 127.0.0.1 is in use; choose another with --port [port-in-use]"
        ]
    ended = command_line("serve", models.classify, "--host", "192.0.2.1", "--port", 0, check=False)
    assert (ended.code, "cannot-listen" in ended.err) == (2, True)


def test_what_cannot_be_served_is_refused(models: Models, tmp_path: Path) -> None:
    ended = command_line("serve", tmp_path / "none", "--port", 0, check=False)
    assert (ended.code, "[missing-weights]" in ended.err) == (2, True), ended.err
    ended = command_line("predict", models.span, "a question", check=False)
    assert "[texts-for-squad]" in ended.err


def test_a_missing_library_is_one_sentence(models: Models, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ImportError\n")
    shadowed = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for words in (("serve", models.classify), ("watch", models.classify, "--web")):
        process = helpers.subprocess.run(
            helpers.command(*words), env=helpers.environment() | shadowed, capture_output=True, text=True, check=False
        )
        assert process.returncode == 2
        assert "pip install 'bertrain[serve]'" in process.stderr
        assert len(process.stderr.splitlines()) == 1


def test_only_names_of_this_machine_reach_a_server_of_this_machine(server: Server) -> None:
    """A page of another site could make its name mean 127.0.0.1."""
    for host, status in (("localhost:80", 200), ("127.0.0.1", 200), ("evil.example", 421), ("[", 421)):
        assert server.request("/health", headers={"Host": host})[0] == status, host
