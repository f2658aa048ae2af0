"""Served models and live reports in a real Chromium: every form is filled in and answered, on phone and desktop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.served import Models, Server, make_models, started
from tests.services.browser import Browser, background, inked, needs_chromium

pytestmark = [pytest.mark.services, needs_chromium]

HOSTILE = "<img src=x onerror=alert(1)>"
FILLED: dict[str, dict[str, str]] = {
    "base": {"text": "bato [MASK] kese [MASK] livi"},
    "classify": {"text": f"bato kese livi {HOSTILE}"},
    "number": {"text": "bato kese livi"},
    "labels": {"text": "bato kese livi"},
    "tag": {"text": f"bato kese livi moda nufu {HOSTILE}"},
    "span": {"question": "bato bato", "context": f"kese livi {HOSTILE} moda nufu"},
    "embed": {"query": "bato kese", "texts": f"bato\n\nlivi moda {HOSTILE}\nkese bato\n"},
}
SHOTS = os.environ.get("BERTRAIN_SCREENSHOTS", "")  # a folder, to look at what the tests see


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: Models) -> Iterator[Server]:
    with started("serve", *models.all, num_addresses=7) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"), scripts=True)
    yield opened
    opened.close()


def submit(browser: Browser, fields: dict[str, str]) -> None:
    """Fill in the form, press its button, and wait for the answer."""
    browser.evaluate(
        f"""new Promise(done => {{
            for (const [name, value] of Object.entries({json.dumps(fields)})) form.elements[name].value = value;
            new MutationObserver(() => done()).observe(result, {{childList: true}});
            form.querySelector("button").click();
        }})"""
    )


def look_at(browser: Browser, name: str) -> np.ndarray:
    picture = browser.screenshot()
    if SHOTS:
        Image.fromarray(picture).save(Path(SHOTS) / f"{name}.png")
    return picture


def assert_fits(picture: np.ndarray, browser: Browser, width: int) -> None:
    assert picture.shape[1] == browser.size()[0] == width
    ink = inked(picture)
    assert ink.mean() > 0.005
    assert not ink[:, :8].any(), "something sticks out on the left"
    assert not ink[:, -8:].any(), "something sticks out on the right"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", FILLED)
def test_every_form_is_answered(browser: Browser, server: Server, name: str, width: int, scheme: str) -> None:
    """The page shows what the API answers, a text is never taken for HTML, and nothing is asked of others."""
    browser.open(f"{server.root}/{name}/", width=width, scheme=scheme)
    submit(browser, FILLED[name])
    shown = browser.evaluate("result.innerText")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    for word in words_of(server, name):
        assert word in shown, shown
    assert all(address.startswith(server.root) for address in browser.requests())
    picture = look_at(browser, f"{name}-{width}-{scheme}")
    assert_fits(picture, browser, width)
    assert min(background(picture)) > 240 if scheme == "light" else max(background(picture)) < 40


def words_of(server: Server, name: str) -> list[str]:
    """Words that the answer of a form must show, as the API answers."""
    fields: dict[str, Any] = FILLED[name]
    if name == "base":
        (masks,) = server.answers("/base/fill-mask", {"texts": [fields["text"]]})
        return [guess["word"] for guesses in masks for guess in guesses]
    if name == "span":
        (answer,) = server.answers("/span/answer", {"questions": [fields]})
        return [answer["answer"], f"{answer['candidates'][0]['probability']:.1%}"]
    if name == "embed":
        texts = [line for line in fields["texts"].split("\n") if line]
        found = server.answers("/embed/nearest", {"query": fields["query"], "texts": texts})
        return [f"{one['similarity']:.3f}" for one in found] + texts
    (answer,) = server.answers(f"/{name}/predict", {"texts": [fields["text"]]})
    if name == "number":
        return [f"{answer['number']:.3g}"]
    if name == "tag":
        return [fields["text"].split()[0], *(f"{one['text']} ({one['label']})" for one in answer["entities"])]
    return [word for label, share in answer["probabilities"].items() for word in (label, f"{share:.1%}")]


def test_a_refusal_is_shown(browser: Browser, server: Server) -> None:
    browser.open(f"{server.root}/classify/", width=390)
    submit(browser, {"text": "bato " * 40})
    assert "42 tokens" in browser.evaluate("result.innerText")
    look_at(browser, "refusal")
    browser.evaluate("form.elements.truncate.checked = true")
    submit(browser, {"text": "bato " * 40})
    assert "%" in browser.evaluate("result.innerText")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_other_pages_fit(browser: Browser, server: Server, path: str) -> None:
    for width, scheme in ((1200, "light"), (390, "dark")):
        browser.open(f"{server.root}{path}", width=width, scheme=scheme)
        assert all(address.startswith(server.root) for address in browser.requests())
        assert_fits(look_at(browser, f"page{path.replace('/', '-')}-{width}"), browser, width)


def test_a_screen_reader_finds_the_form(browser: Browser, server: Server) -> None:
    browser.open(f"{server.root}/span/", width=1200)
    nodes = [node for node in browser.send("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    assert ("textbox", "A question") in named
    assert ("textbox", "The text that has the answer") in named
    assert ("button", "Answer") in named
    assert ("heading", "span") in named


def test_the_live_report_moves_while_a_run_trains(browser: Browser, tmp_path: Path) -> None:
    """Of a folder of runs: the list, a run that goes on while its page is open, and the comparison."""
    data = helpers.make_data(tmp_path)
    for number in range(2):
        settings = helpers.tiny_settings(train__max_steps=12, train__max_samples=192, log__level="quiet")
        pretrain(settings, data, tmp_path / "runs" / f"run-{number}")
    with started("watch", tmp_path / "runs", "--web", "--every", "0.2") as server:
        for width, scheme in ((1200, "light"), (390, "dark")):
            browser.open(f"{server.root}/", width=width, scheme=scheme)
            assert_fits(look_at(browser, f"runs-{width}"), browser, width)
        assert "8 of 12" in browser.evaluate("document.querySelector('main').innerText")
        browser.open(f"{server.root}/runs/run-0/", width=1200)
        assert "8 of 12" in browser.evaluate("document.querySelector('main').innerText")
        browser.evaluate("document.querySelector('details').open = true; scrollTo(0, 700)")
        resume(tmp_path / "runs" / "run-0", [("train.max_samples", "0")])
        waited = (
            "new Promise(done => {const look = () => document.querySelector('main').innerText.includes('12 of 12') ? "
        )
        browser.evaluate(waited + "done() : setTimeout(look, 100); look()})")
        assert browser.evaluate("document.querySelector('details').open")
        assert browser.evaluate("scrollY") == 700
        assert_fits(look_at(browser, "live"), browser, 1200)
        browser.open(f"{server.root}/compare", width=1200)
        assert_fits(look_at(browser, "compare"), browser, 1200)
        assert all(address.startswith(server.root) for address in browser.requests())
        assert server.stop()[0] == 0
        browser.evaluate("new Promise(done => setTimeout(done, 1000))")
        assert "does not answer" in browser.evaluate("document.querySelector('footer').innerText")
