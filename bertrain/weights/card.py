"""The model card: README.md of an exported run, in Markdown with the header that model hubs read.

It says what the model is, how to load it, what it was trained on and how, and how good it is on held-out examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import bertrain
from bertrain.base.formatting import BASELINE, show_brief, title_of
from bertrain.config.model_size import count_parameters
from bertrain.config.settings import Settings
from bertrain.run.folder import Run
from bertrain.run.records import is_metric
from bertrain.run.stream import MetricsTable, read_metrics

PIPELINES = {
    "pretrain": "fill-mask", "classify": "text-classification", "multilabel": "text-classification",
    "regress": "text-classification", "span": "question-answering", "tag": "token-classification",
    "embed": "sentence-similarity",
}  # fmt: skip
"""The name that model hubs and Transformers' `pipeline` have for the use of each head."""
PRETRAINING = {
    "mlm_loss": "loss of masked words",
    "mlm_accuracy": "masked words predicted",
    "hidden_accuracy": "of those replaced by [MASK]",
    "constant_accuracy": "always the commonest word (baseline)",
    "nsp_accuracy": "next sentence predicted",
}
HERE = "PATH/TO/THIS/FOLDER"
LIMITS = (
    "The model repeats what it read, its mistakes and prejudices included, and is made for texts like those. The "
    "license of these texts applies."
)


def model_card(run: Run, step: int | None = None, text: str = "", language: str = "") -> str:
    """The card of a run's checkpoint after `step` steps, or all; `text` is a sentence on the text behind its data."""
    table, settings = read_metrics(run.folder / "metrics.jsonl"), run.settings
    model, use = settings.model, PIPELINES[settings.model.head]
    step = int(table.column("step").max(initial=0)) if step is None else step
    library = "sentence-transformers" if model.head == "embed" else "transformers"
    kind = "ModernBERT" if model.family == "modern" else "RoBERTa" if model.is_roberta else "BERT"
    header = [f"library_name: {library}", f"pipeline_tag: {use}", f"tags: [{kind.lower()}, bertrain]"]
    header += [f"language: {language}"] if language else []
    trained = "trained" if model.head == "pretrain" else f"fine-tuned for {use.replace('-', ' ')}"
    size = f"{model.num_layers} layers, {model.hidden_size} wide, {count_parameters(model)[0]:,} parameters"
    words = f"vocabulary of {model.vocab_size:,} word pieces, up to {settings.data.max_seq_length} tokens"
    sections = [
        "\n".join(["---", *header, "---"]),
        f"# A {kind} {trained} with bertrain",
        f"{size}, {words}.",
        f"```python\n{_usage(use, run)}\n```",
        "## Training",
        *([text] if text else []),
        _table(_training(run, step, table)),
        *_results(settings, step, table),
        "## Limits",
        LIMITS,
        f"Made with bertrain {bertrain.__version__}.",
    ]
    return "\n\n".join(sections) + "\n"


def _usage(use: str, run: Run) -> str:
    if use == "sentence-similarity":
        load = f'SentenceTransformer("{HERE}").encode(["a text", "another"])'
        return f"from sentence_transformers import SentenceTransformer\n\n{load}"
    given = {
        "fill-mask": f'"a {run.vocabulary().special[-1]} ."',
        "question-answering": 'question="a question", context="a text"',
    }.get(use, '"a text"')
    return f'from transformers import pipeline\n\npipeline("{use}", "{HERE}")({given})'


def _training(run: Run, step: int, table: MetricsTable) -> dict[str, str]:
    """How it was trained. Of paths only the end is shown: the rest belongs to the machine."""
    settings = run.settings
    optimizer, batch, model = settings.optimizer, settings.batch, settings.model
    facts = {"steps": f"{step:,}"}
    if table.num_steps:
        until = table.column("step") <= step
        facts["tokens read"] = f"{np.nansum(table.column('tokens')[until]):,.0f}"
        facts["examples read"] = f"{np.nan_to_num(table.column('samples')[until]).max(initial=0):,.0f}"
    facts |= {
        "a step": f"{batch.tokens:,} tokens" if batch.tokens else f"{batch.sequences:,} sequences",
        "optimizer": f"{optimizer.name}, learning rate {optimizer.learning_rate:g}, "
        f"weight decay {optimizer.weight_decay:g}",
        "dropout": f"{model.hidden_dropout:g}, attention {model.attention_dropout:g}",
        "precision": settings.train.precision,
        "seed": str(settings.train.seed),
    }
    if model.head == "pretrain":
        facts["masked words"] = f"{settings.data.mask_probability:.0%}"
        if model.rtd:
            share = (
                f"{settings.data.replaced_share:.0%} of the masked words, by {_end_of(Path(settings.data.generator))}"
            )
            facts["replaced words"] = f"{share}; weight of the loss {model.rtd:g}"
    else:
        facts["task"] = settings.task.name
    facts["began with"] = _end_of(Path(run.init)) if run.init else "random weights"
    facts["data"] = f"{_end_of(run.data)}, fingerprint {run.data_fingerprint[:16]}"
    return facts


def _end_of(path: Path) -> str:
    return "/".join(path.parts[-2:])


def _results(settings: Settings, step: int, table: MetricsTable) -> list[str]:
    """The last evaluation up to `step`, or that there was none."""
    evaluations = [one for one in table.evaluations if one.step <= step]
    if not evaluations:
        return ["## Results", "It was not evaluated on held-out examples."]
    metrics = evaluations[-1].metrics
    if settings.model.head == "pretrain":
        rows = {label: _shown(name, metrics) for name, label in PRETRAINING.items() if name in metrics}
    else:
        named = [name for name in metrics if is_metric(name)]
        rows = {_title(name): _shown(name, metrics) for name in named}
    where = f" on {metrics['examples']:,.0f} held-out examples" if "examples" in metrics else " on held-out examples"
    when = f", after step {evaluations[-1].step:,}" if evaluations[-1].step != step else ""
    return [f"## Results{where}{when}", _table(rows)]


def _title(name: str) -> str:
    if name.startswith(BASELINE):
        return f"{title_of(name.removeprefix(BASELINE))} of the same answer for every example (baseline)"
    return title_of(name)


def _shown(name: str, metrics: Mapping[str, float]) -> str:
    return show_brief(name.removeprefix(BASELINE), metrics[name])


def _table(rows: Mapping[str, str]) -> str:
    cells = {name: value.replace("|", r"\|") for name, value in rows.items()}  # a folder may be called so
    lines = [("what", "value"), ("---", "---"), *cells.items()]
    return "\n".join(f"| {name} | {value} |" for name, value in lines)
