"""The report: every figure by hand, and a page that is whole, safe and needs nothing else."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.model_size import count_parameters
from bertrain.reports import compare, plots
from bertrain.reports import history as arithmetic
from bertrain.reports.report import report
from bertrain.training.start import pretrain
from tests import helpers

EMPTY_TAGS = {"meta", "link", "img", "br", "hr"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and three runs: `whole` and `faster` with evaluations, `words` without next sentences."""
    folder = tmp_path_factory.mktemp("report")
    data = helpers.make_data(folder)
    evaluated = {"evaluate__data": data, "evaluate__every_samples": 48, "evaluate__max_examples": 24}
    pretrain(helpers.tiny_settings(train__max_steps=6, **evaluated), data, folder / "whole")
    pretrain(
        helpers.tiny_settings(train__max_steps=4, optimizer__learning_rate=0.01, **evaluated), data, folder / "faster"
    )
    pretrain(helpers.tiny_settings(train__max_steps=3, model__nsp=False), data, folder / "words")
    return folder


def history(folder: Path) -> arithmetic.History:
    return arithmetic.read(folder, folder.name)


def copy(trained: Path, name: str, place: Path) -> Path:
    return Path(shutil.copytree(trained / name, place))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_metrics(run: Path, records: list[dict[str, Any]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def step(number: int, **changes: Any) -> dict[str, Any]:
    """A step whose figures can be computed in the head."""
    record = {
        "kind": "step",
        "step": number,
        "samples": 10 * number,
        "tokens": 100,
        "loss": 8.0 - number / 10,
        "mlm_loss": 7.0,
        "mlm_accuracy": number / 100,
        "nsp_loss": 1.0 - number / 10,
        "nsp_accuracy": 0.5,
        "learning_rate": 0.001,
        "gradient_norm": 2.0,
        "applied": True,
        "tokens_per_s": 50.0,
        "seconds": {"data": 0.25, "forward_backward": 1.25, "reduction": 0.25, "optimizer": 0.25},
    }
    return record | changes


def evaluation(number: int, accuracy: float | None) -> dict[str, Any]:
    return {"kind": "evaluation", "step": number, "samples": 10 * number, "loss": 7.5, "mlm_loss": 6.75,
            "mlm_accuracy": accuracy, "nsp_loss": 0.75, "nsp_accuracy": 0.625, "examples": 1234.0}  # fmt: skip


class Page(HTMLParser):
    """A page taken apart; refuses tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in EMPTY_TAGS:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style" and data.strip():
            self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def plots(self) -> list[ElementTree.Element]:
        """Every SVG, parsed as the XML it must be."""
        return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)]

    def labels(self) -> list[str]:
        return [plot.attrib["aria-label"] for plot in self.plots()]


def test_the_figures_are_those_of_the_metrics(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    records = [step(number) for number in range(1, 21)]
    records[18] |= {"loss": None, "gradient_norm": None, "applied": False}  # the last but one is step 19
    records[4] |= {"applied": False}
    records += [evaluation(10, 0.125), evaluation(15, None), evaluation(20, 0.125)]
    write_metrics(run, records)
    summary = history(run).summary
    assert (summary.steps, summary.samples, summary.tokens) == (20, 200, 2000)
    assert summary.seconds == [5.0, 25.0, 5.0, 5.0]
    assert summary.shares == [0.125, 0.625, 0.125, 0.125]
    assert summary.tokens_per_s == 50.0
    assert summary.tail == 2
    assert summary.last["loss"] == 6.0  # step 19 has none
    assert summary.last["mlm_accuracy"] == pytest.approx(0.195)
    assert summary.headline == "mlm_accuracy"
    assert summary.best is not None
    assert (summary.best.step, summary.best.metrics["mlm_accuracy"]) == (10, 0.125)
    assert (summary.median_step_s, summary.samples_per_s) == (2.0, 5.0)
    assert summary.not_applied == [5, 19]
    facts = {label: (value, note) for label, value, note in compare.known_facts(history(run))}
    values = {label: value for label, (value, _) in facts.items()}
    assert (
        values.items()
        >= {
            "Parameters": "23.3 k",
            "Steps": "20",
            "Samples": "200",
            "Tokens": "2,000",
            "Loss": "6.0000",
            "Best evaluation": "12.50%",
            "Throughput": "50",
            "Examples/s": "5",
            "Step": "2,000 ms",
            "Time in steps": "40 s",
        }.items()
    )
    assert "19.50%" in values.values(), "the main metric of the last steps"
    assert facts["Loss"][1] == "mean of the last 2 steps"
    assert facts["Best evaluation"][1].endswith("at step 10")
    assert compare.UNKNOWN not in values.values()
    assert "Energy" not in facts, "without telemetry"
    page = Page(report([run]))
    for value, note in facts.values():
        assert value in page.texts
        assert note in page.texts
    assert "run: 2 of 20 steps were not finite and not applied: 5, 19" in page.text
    assert "5 s, 12.5%" in page.texts
    assert "25 s, 62.5%" in page.texts
    assert "Time per phase: data 12.5%, forward + backward 62.5%, reduction 12.5%, optimizer 12.5%" in page.labels()
    row = "10 100 1,234 7.5000 6.7500 best 12.50% 0.7500 62.50%"
    assert row in page.text
    assert "15 150 1,234 7.5000 6.7500 – 0.7500 62.50%" in page.text


def test_the_parameters_are_counted(trained: Path) -> None:
    width, inner, words, positions = 32, 64, helpers.vocab_size(), 64
    embeddings = (words + positions + 2) * width + 2 * width
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    masked_words = width * width + width + 2 * width + words
    next_sentence = width * width + width + 2 * width + 2
    total = embeddings + 2 * layer + masked_words + next_sentence
    assert count_parameters(history(trained / "whole").run.settings.model)[0] == total == 23_288


def test_a_rate_of_several_steps_is_tokens_over_seconds(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    slow = {"data": 0.0, "forward_backward": 8.0, "reduction": 0.0, "optimizer": 0.0}
    write_metrics(run, [step(1), step(2, seconds=slow, tokens_per_s=12.5)])
    assert plots.points(history(run), "tokens_per_s").tolist() == [50.0, 12.5]
    monkeypatch.setattr(arithmetic.thin, "__defaults__", (1,))
    assert plots.points(history(run), "tokens_per_s").tolist() == [20.0]  # 200 tokens in 10 s, not (50 + 12.5) / 2
    assert plots.points(history(run), "mlm_accuracy").tolist() == pytest.approx([1.5])  # in percent


# --- the page ------------------------------------------------------------------------------------


def test_the_page_is_whole_and_needs_nothing_else(trained: Path) -> None:
    path = report([trained / "whole"])
    assert path == trained / "whole" / "report.html"
    page = Page(path)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object"} & set(names)
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.tags[0] == ("html", {"lang": "en"})
    without_names = re.sub(r'xmlns(:xlink)?="http://www\.w3\.org/[^"]*"', "", page.source)
    assert not re.search(r"https?:|//|@import|url\((?!#)", without_names)
    assert names.count("figure") == names.count("figcaption") == names.count("svg")
    drawn = {label.partition(" by ")[0].partition(":")[0] for label in page.labels()}
    usual = [curve.title for curve in (*plots.CURVES, *plots.COURSE) if not curve.field.startswith("rtd_")]
    assert drawn >= {*usual, "Time per phase"}
    assert names.count("table") == names.count("caption") == names.count("thead")
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th")
    titles = ["Summary", "Curves", "Time and balance", "Telemetry", "Evaluations", "Checkpoints"]
    titles += ["Warnings and errors", "Settings", "Environment"]
    assert set(titles) <= set(page.texts)
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert links[0] == "#content"
    assert "End: all 6 steps are done." in page.texts
    assert len(links) == 1 + len(titles)
    assert {str(link)[1:] for link in links} <= ids
    assert {"header", "nav", "main", "footer"} <= set(names)
    assert path.read_bytes().isascii()
    assert [each.name for each in path.parent.glob(".*report*")] == []


def test_the_plots_are_whole_coloured_by_the_page_and_alone(trained: Path) -> None:
    page = Page(report([trained / "whole"]))
    ids = re.findall(r'\bid="([^"]*)"', page.source)
    assert len(ids) == len(set(ids)) > 9
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', page.source)) <= set(ids)
    for plot in page.plots():
        assert plot.attrib["role"] == "img"
        inside = ElementTree.tostring(plot, encoding="unicode")
        assert not re.search(r"#[0-9a-f]{6}\b", inside)
        assert "var(--muted)" in inside
        assert "font" not in inside
        assert "<style" not in inside
    steps = [record for record in metrics(trained / "whole") if record["kind"] == "step"]
    assert all(one["sequences_per_s"] * sum(one["seconds"].values()) == pytest.approx(24) for one in steps)
    first, last = (steps[index]["mlm_loss"] for index in (0, -1))
    assert f"Masked-word loss by step: from {first:.4g} to {last:.4g}" in page.labels()
    assert "Pale lines" not in page.text
    assert "Rings are held-out evaluations." in page.text


def test_it_says_that_evaluations_mask_another_share(trained: Path) -> None:
    """Their losses lie below the curve of the training, and are no sign of anything else."""
    history = arithmetic.read(trained / "whole", "whole")
    settings = history.run.settings
    more = replace(settings, data=replace(settings.data, mask_probability=0.3))
    shown = plots.how_to_read([history, replace(history, run=replace(history.run, settings=more))])
    assert "always with 15% of the words masked; training: 15% or 30%." in shown


def test_the_same_run_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    runs = [trained / "whole", trained / "faster"]
    first, second = report(runs, out=tmp_path / "first.html"), report(runs, out=str(tmp_path / "second.html"))
    assert first.read_bytes() == second.read_bytes()


def test_several_runs_lie_over_each_other(trained: Path, tmp_path: Path) -> None:
    runs = [trained / "whole", trained / "faster", trained / "words"]
    page = Page(report(runs, out=tmp_path / "all.html"))
    assert "3 runs" in page.texts
    loss = next(label for label in page.labels() if label.startswith("Masked-word loss"))
    assert loss.count("from") == 3
    assert "run 3 from" in loss
    next_sentence = next(label for label in page.labels() if label.startswith("Next-sentence loss"))
    assert next_sentence.count("from") == 2
    drawing = page.source[page.source.index(loss) :].partition("</svg>")[0]
    assert all(f"var(--run-{number})" in drawing for number in range(3))
    assert "var(--run-3)" not in drawing
    differing = compare.differing([compare.settings_of(history(run)) for run in runs])
    assert differing == [
        "model.nsp",
        "optimizer.learning_rate",
        "train.max_steps",
        "evaluate.data",
        "evaluate.every_samples",
        "evaluate.max_examples",
    ]
    assert "optimizer.learning_rate 0.001 0.01 0.001 " in page.text
    assert page.text.count("optimizer.learning_rate") == 1
    assert "Run 1, 2, 3: " in page.text


def test_a_run_without_next_sentences_has_no_plot_of_them(trained: Path) -> None:
    page = Page(report([trained / "words"]))
    assert [label for label in page.labels() if label.startswith("Masked-word loss")]
    assert "Next-sentence" not in page.text
    assert "None so far; set evaluate.data to evaluate during training." in page.texts


def test_settings_beside_their_defaults(trained: Path) -> None:
    page = Page(report([trained / "whole"]))
    assert "hidden_size 768 32 " in page.text
    assert "mask_probability 0.15 whole_word False " in page.text
    assert "<del>768</del> <mark>32</mark>" in page.source
    assert str(trained / "data") in page.texts


def test_every_start_has_its_environment(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    starts = json.loads((run / "environment.json").read_text())
    starts = [starts[0] | {"host": "first-host"}, starts[0] | {"host": "second-host", "gpus": 8}]
    (run / "environment.json").write_text(json.dumps(starts))
    page = Page(report([run]))
    assert {"first-host", "second-host", "gpus", starts[0]["torch"]} <= set(page.texts)
    (run / "environment.json").unlink()
    assert "first-host" not in Page(report([run])).text


def test_long_runs_are_thinned_and_say_so(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    write_metrics(run, [step(number) for number in range(1, 2501)])
    path = report([run])
    page = Page(path)
    assert "Each point is the mean of 3 steps. Pale lines are points, " in page.text
    assert "their centered mean over 27." in page.text  # 834 points: 2 * (834 // 60) + 1
    assert path.stat().st_size < 1_000_000


def test_steps_that_are_not_finite_are_marked(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    broken = {"loss": None, "mlm_loss": None, "nsp_loss": None, "gradient_norm": None, "applied": False}
    write_metrics(run, [step(1), step(2, **broken), step(3, **broken), step(4)])
    page = Page(report([run]))
    assert "2 of 4 steps were not finite and not applied: 2, 3" in page.text
    assert "Crosses are steps that were not finite." in page.text
    write_metrics(run, [step(number, **broken) for number in range(1, 21)])
    page = Page(report([run]))
    assert "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, …" in page.text
    assert not [label for label in page.labels() if label.startswith("Masked-word loss")]


def test_a_single_step_is_a_report(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    write_metrics(run, [step(1)])
    assert "last step" in Page(report([run])).texts


def test_a_line_being_written_is_left_out(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    write_metrics(run, [step(1), step(2)])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "step": 3, "lo')
    assert history(run).summary.steps == 2


def test_data_that_is_gone_or_another_is_not_shown(trained: Path, tmp_path: Path) -> None:
    lengths = json.loads((trained / "data" / "manifest.json").read_text())["length_histogram"]
    assert history(trained / "whole").lengths == {int(length): count for length, count in lengths.items()}
    run = copy(trained, "whole", tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["data"]["folder"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(config))
    page = Page(report([run]))
    assert f"The data is no longer at {tmp_path / 'gone'}, so its lengths are unknown." in page.texts
    assert not [label for label in page.labels() if label.startswith("Share of examples by length")]
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "manifest.json").write_text(json.dumps({"length_histogram": {"5": 1}}))
    assert history(run).lengths is None


def test_names_are_text_and_never_markup(trained: Path, tmp_path: Path) -> None:
    name = '<script>alert("1")<&'
    first = copy(trained, "whole", tmp_path / name)
    second = copy(trained, "faster", tmp_path / "später 日本")
    config = json.loads((first / "config.json").read_text())
    config["settings"]["evaluate"]["data"] = "<b onload=x>"
    (first / "config.json").write_text(json.dumps(config))
    (first / "environment.json").write_text(json.dumps([{"started": "<i>now</i>", "host": name}]))
    write_metrics(first, [*metrics(first), step(7, loss=None)])
    for runs in ([first], [first, second]):
        page = Page(report(runs))
        assert "script" not in [tag for tag, _ in page.tags]
        assert "b" not in [tag for tag, attributes in page.tags if "onload" in attributes]
        assert page.texts.count(name) >= 2
        assert "<b onload=x>" in page.texts
        assert "<i>now</i>" in page.texts
    assert "später 日本" in page.texts


# --- what a user can get wrong -------------------------------------------------------------------


def test_errors_are_one_sentence(trained: Path, tmp_path: Path) -> None:
    whole = trained / "whole"
    for runs in ([tmp_path], [whole, tmp_path / "nowhere"]):
        with helpers.refused("no-run", runs[-1]):
            report(runs)
    for runs in ([whole, trained / "faster" / ".." / "whole"], []):
        with helpers.refused("runs-not-distinct"):
            report(runs)
    with helpers.refused("unwritable-file", tmp_path / "nowhere" / "report.html"):
        report([whole], out=tmp_path / "nowhere" / "report.html")
    empty = copy(trained, "whole", tmp_path / "empty")
    write_metrics(empty, [])
    with helpers.refused("no-metrics", empty):
        report([empty])
    (empty / "metrics.jsonl").unlink()
    with helpers.refused("no-metrics", empty):
        report([empty])


def test_what_is_missing_is_said(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    lines = [json.dumps(step(number)) for number in (1, 2, 6, 7, 9)]
    lines.insert(2, lines[1][:40])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "environment.json").write_text("[{")
    shutil.rmtree(run / "logs")
    (run / "telemetry.csv").write_text("time,power_w\n100,200\n40,300\n41,x\n200,400\n")
    page = Page(report([run]))
    for sentence in (
        "environment.json is damaged, so the machine is unknown",
        "1 line of metrics.jsonl could not be read",
        "not in metrics.jsonl: 4 steps, from step 3, 8 on",
        "1 line of telemetry could not be read",
        "the clock was set back once between samples; plots count the time between samples",
        "rank 0 has no telemetry for 2 min 40 s at the longest",
        "there are no logs, so warnings are unknown",
    ):
        assert f"run: {sentence}" in page.texts
    assert "Power over time: rank 0 200 W to 400 W, mean 300 W" in page.labels()


def test_checkpoints_and_warnings_of_the_run_are_listed(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, "whole", tmp_path / "run")
    newest = run / "checkpoints" / "step-00000006"
    shutil.copytree(newest, run / "checkpoints" / "damaged-step-00000007")
    shutil.copytree(newest, run / "checkpoints" / "aside-1-step-00000008")
    (run / "checkpoints" / "best.json").write_text('{"step": 6, "mlm_accuracy": 0.5}')
    with open(run / "logs" / "rank-0.jsonl", "a") as log:
        log.write('{"time": 1e9, "level": "warning", "event": "warning", "text": "rank 3 is <slow>"}\n')
    kept = {one.name: (one.step, one.is_best, one.state) for one in history(run).checkpoints}
    assert kept == {
        "step-00000006": (6, True, "whole"),
        "damaged-step-00000007": (7, False, "damaged, passed over"),
        "aside-1-step-00000008": (8, False, "put aside"),
    }
    assert history(run).checkpoints[0].bytes == sum(file.stat().st_size for file in newest.iterdir())
    page = Page(report([run]))
    assert "7 damaged, passed over" in page.text
    assert any(text.endswith("rank 0  warning  rank 3 is <slow>") for text in page.texts)


def test_a_folder_in_the_way_is_left_alone(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with helpers.refused("out-is-folder", tmp_path / "report.html"):
        report([trained / "whole"], out=tmp_path / "report.html")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_report_takes_no_other_files_place(trained: Path) -> None:
    config = trained / "whole" / "config.json"
    before = config.read_text()
    with helpers.refused("out-not-html", config):
        report([trained / "whole"], out=config)
    assert config.read_text() == before


def test_the_times_of_ranks_are_averaged_for_each(trained: Path, tmp_path: Path) -> None:
    def told(step: int, host: str, slow: float) -> dict[str, Any]:
        seconds = {"data": 0.001, "forward_backward": slow, "reduction": 0.5, "optimizer": 0.002}
        entries = [{"rank": rank, "host": host, "tokens": 1000.0 * step, "seconds": seconds} for rank in (0, 1)]
        return {"kind": "ranks", "step": step, "ranks": entries}

    run = copy(trained, "words", tmp_path / "run")
    write_metrics(run, [*metrics(run), told(1, "here", 0.010), told(3, "here", 0.030), told(3, "there", 0.040)])
    page = report([run]).read_text()
    for cells in (("0", "here", "2,000", "1.0", "20.0", "500.0", "2.0"), ("1", "there", "3,000", "1.0", "40.0")):
        assert f"<th scope=row>{cells[0]}</th>" + "".join(f"<td>{cell}</td>" for cell in cells[1:]) in page
