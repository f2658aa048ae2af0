import sys, os, torch, json
from bertrain import config
from bertrain.data.batch import Batch
from bertrain.model.bert import Bert, split_parts
from bertrain.model.initial import initialise
from bertrain.model.heads import pretraining_sums
from bertrain.model.fused import FusedBert
from bertrain.optim.arena import Arena
import numpy as np


def make_batch(lengths, T, S, P, vocab, maxlen, device, g):
    cu = np.concatenate([[0], np.cumsum(lengths)])
    n = len(lengths)
    used = cu[-1]
    b = list(cu)
    while b[-1] < T:
        b.append(min(T, b[-1] + maxlen))
    cus = np.full(S + 1, T)
    cus[: len(b)] = b
    ids = torch.randint(5, vocab, (T,), generator=g)
    seg = torch.zeros(T, dtype=torch.long)
    pos = torch.from_numpy(np.arange(T) - np.repeat(np.array(b[:-1]), np.diff(b)))
    for i in range(n):
        seg[cu[i] + lengths[i] // 2 : cu[i + 1]] = 1
    mp = []
    for i in range(n):
        if lengths[i] > 2:
            mp += [cu[i] + 1 + j for j in range(0, lengths[i] - 1, 7)]
    mp = mp[:P]
    pp = torch.zeros(P, dtype=torch.long)
    pp[: len(mp)] = torch.tensor(mp)
    lab = torch.full((P,), -100)
    lab[: len(mp)] = torch.randint(5, vocab, (len(mp),), generator=g)
    nl = torch.full((S,), -100)
    nl[:n] = torch.randint(0, 2, (n,), generator=g)
    cls = torch.from_numpy(np.minimum(cus[:-1], T - 1))
    return Batch(
        input_ids=ids,
        segment_ids=seg,
        position_ids=pos,
        cu_seqlens=torch.from_numpy(cus).int(),
        cls_positions=cls,
        mlm_positions=pp,
        mlm_labels=lab,
        nsp_labels=nl,
        max_seqlen=maxlen,
        sequence_lengths=tuple(int(x) for x in np.diff(b)),
        dropout_seed=5,
        num_tokens=int(used),
        num_sequences=n,
        num_predictions=len(mp),
    ).to(torch.device(device))


def err(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


def check(device, fp8, **model):
    S = config.resolve(
        "bert-base-phase2",
        [(f"model.{k}", str(v)) for k, v in model.items()]
        + [
            ("data.max_seq_length", "64"),
            ("data.max_predictions", "20"),
            ("model.hidden_dropout", "0"),
            ("model.attention_dropout", "0"),
        ],
    )
    g = torch.Generator().manual_seed(3)
    m = Bert(S.model)
    initialise(m, 1)
    with torch.no_grad():
        for n, p in m.named_parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
            else:
                p.mul_(2)
    m = m.to(device)
    arena = Arena(m, split_parts)
    batch = make_batch([37, 1, 64, 19, 0 + 5], 160, 12, 24, S.model.vocab_size, 64, device, g)
    out = m(batch)
    s = pretraining_sums(out.mlm_logits, out.nsp_logits, batch)
    (s.mlm_loss / 24 + s.nsp_loss / 5).backward()
    ref = arena.gradients.clone()
    refs = s.stack()
    [arena.view(arena.gradients, n).fill_(float("nan")) for n in arena.places]
    f = FusedBert(m, arena, fp8=fp8, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    one = lambda v: torch.tensor([v], device=device)
    if fp8:
        f.requantise()
    args = (batch, torch.tensor([7], device=device), one(1 / 24), one(1 / 5))
    sums = f.forward_backward(*args, False)
    if fp8:
        f.scales.collect()
        f.scales.update()
        f.requantise()
        f.scales.update() if 0 else None
        sums = f.forward_backward(*args, False)
    print("sums", sums.tolist(), refs.tolist())
    worst = {}
    for n in arena.places:
        worst[n] = err(arena.view(arena.gradients, n), arena.view(ref, n))
    top = sorted(worst.items(), key=lambda x: -x[1])[:6]
    print("overall", err(arena.gradients, ref), top)
    once = arena.gradients.clone()
    f.forward_backward(*args, True)
    print("accumulate", err(arena.gradients, 2 * once))


if __name__ == "__main__":
    dev = sys.argv[1]
    for fp8 in [False, True] if dev == "cuda" else [False]:
        check(
            dev,
            fp8,
            vocab_size=200,
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            intermediate_size=128,
            max_positions=64,
            pad_vocab_to=8,
        ) if dev == "cpu" else check(
            dev,
            fp8,
            vocab_size=2000,
            hidden_size=256,
            num_layers=3,
            num_heads=4,
            intermediate_size=1024,
            max_positions=64,
            pad_vocab_to=64,
        )
