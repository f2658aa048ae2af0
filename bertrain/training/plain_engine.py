"""The plain engine: the model under autograd, in float32 or under autocast, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.config.settings import Settings, TrainSettings
from bertrain.data.feed.loader import Step
from bertrain.model.arena import Arena
from bertrain.model.batch import Batch
from bertrain.model.encoder import EncoderModel, Outputs
from bertrain.model.heads import answer_sums, pretraining_sums
from bertrain.model.sums import Sums, packed_sums
from bertrain.optim.clipping import is_finite
from bertrain.optim.optimizer import Optimizer
from bertrain.optim.verdict import Verdict
from bertrain.ranks.parallel import Ranks
from bertrain.run.loss_scale import LossScale
from bertrain.training.exchange import Exchange
from bertrain.training.precision import autocast
from bertrain.training.recompute import recompute_layers


class PlainEngine:
    """The specification of every engine; see `engine.Engine` for the methods."""

    needs_few_shapes = False

    def __init__(
        self,
        model: EncoderModel,
        arena: Arena,
        optimizer: Optimizer,
        exchange: Exchange,
        ranks: Ranks,
        settings: Settings,
    ) -> None:
        self._model, self._arena, self._optimizer, self._settings = model, arena, optimizer, settings
        self._exchange, self._ranks = exchange, ranks
        self.sums = packed_sums(device=arena.values.device)
        self.peaks: list[Tensor] = []
        self.uses_graphs = False
        self._loss_scale = LossScale(self.sums.device) if settings.train.precision == "fp16" else None
        recompute_layers(model, settings.train.activation_checkpointing)
        if self._loss_scale is not None:
            exchange.loss_scale = self._loss_scale.scale
        self._completes_gradient = False
        if not exchange.is_idle:
            for name, parameter in model.named_parameters():
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: exchange.parameter_ready(name) if self._completes_gradient else None
                )

    def state(self) -> dict[str, Tensor]:
        return {} if self._loss_scale is None else self._loss_scale.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        if self._loss_scale is not None:
            self._loss_scale.load(state)

    def begin(self, step: Step) -> None:
        self._arena.gradients.zero_()
        self.sums.zero_()

    def add_bin(self, batch: Batch, step: Step, *, is_last: bool) -> None:
        # Losses are divided by the counts of the whole step, so the bins of all ranks add up to its exact mean.
        batch = self._place(batch)
        torch.manual_seed(batch.dropout_seed)
        # Around `_loss`, not in it: PyTorch's cache on disk takes no compiled function that enters autocast.
        with autocast(self._settings.train, self.sums.device):
            loss, sums = self._loss(batch, max(1, step.num_predictions), step.num_sequences, step.num_tokens)
        self._completes_gradient = is_last
        (loss if self._loss_scale is None else loss * self._loss_scale.scale).backward()
        self.sums += sums

    def _place(self, batch: Batch) -> Batch:
        device = self.sums.device
        return batch.without_padding() if device.type == "cpu" and not self.needs_few_shapes else batch.to(device)

    @torch.no_grad()
    def embeddings(self, batch: Batch) -> Tensor:
        batch = self._place(batch)
        torch.manual_seed(batch.dropout_seed)
        with autocast(self._settings.train, self.sums.device):
            pooled = self._model(batch).answers
        assert pooled is not None
        return pooled[batch.is_real]

    def _loss(
        self, batch: Batch, num_predictions: int | Tensor, num_sequences: int | Tensor, num_tokens: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """A bin's part of the step's loss, and its packed `Sums`."""
        sums = sums_of(self._model(batch), batch, self._settings.model.head)
        loss = sums.mlm_loss / num_predictions + sums.sequence_loss / num_sequences
        if sums.rtd_loss is not None:
            loss = loss + self._settings.model.rtd * sums.rtd_loss / num_tokens
        return loss, sums.pack()

    def outputs(self, batch: Batch) -> Outputs:
        return plain_outputs(self._model, batch, self._settings.train)

    def discard_bins(self) -> None:
        pass  # `begin` clears everything

    def update(self, rate: float) -> Tensor:
        norm, factor = self._exchange.norm_and_factor()
        apply = is_finite(self.sums.sum(), norm)
        self._optimizer.step(rate, factor, apply)
        if self._exchange.is_sharded:
            self._ranks.all_gather_shards(self._arena.values)
        if self._loss_scale is None:
            return Verdict.pack(norm, apply)
        verdict = Verdict.pack(norm, apply, self._loss_scale.scale)
        self._loss_scale.update(apply)
        return verdict


def sums_of(outputs: Outputs, batch: Batch, head: str) -> Sums:
    if outputs.answers is not None:
        return answer_sums(outputs.answers, batch, head)
    assert outputs.mlm_logits is not None
    return pretraining_sums(outputs.mlm_logits, outputs.nsp_logits, batch, outputs.rtd_logits)


@torch.no_grad()
def plain_outputs(model: EncoderModel, batch: Batch, settings: TrainSettings) -> Outputs:
    was_training = model.training
    with autocast(settings, batch.input_ids.device):
        outputs = model.eval()(batch)
    model.train(was_training)
    return outputs
