"""GPUs and networks that a plan can be made for: those of config/devices.toml, of a file, or of a profile."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.base.files import read_text
from bertrain.base.formatting import GIB
from bertrain.base.schema import Finite, JsonError, check_value
from bertrain.config.recipe import read_toml

TILE_OPERATIONS = 2 * 128 * 128 * 1024  # of a usual tile of a matrix product
SAYS_NOTHING = r"nvidia|tesla|geforce|sxm\d?|hbm3e?"  # words of CUDA's names that tell no two cards of the table apart
LINK_SHARE = 0.8  # of a link's stated bandwidth, that NCCL's large collectives reach


@dataclass(frozen=True)
class Gpu:
    """What one device can do, in operations and bytes per second that training reaches."""

    name: str
    products: dict[str, float]
    """Operations per second of a large matrix product, by precision."""
    attention_share: float
    """Of the rate of a large product, that attention reaches."""
    memory: float
    """Bytes per second of kernels that are bound by memory."""
    exposed_bytes: float
    """Share of a product's bytes that its operations do not hide."""
    launch_s: float
    """Seconds between two kernels."""
    fill_s: float
    """Seconds of a kernel to fill and drain the device."""
    processors: int
    """Parts that compute tiles of a product, one each."""
    link: float
    """Stated bytes per second to other devices of the machine, in one direction."""
    memory_bytes: int
    inside: str = "nvlink"
    """The link to other devices of the machine."""
    slowdown: float = 1.0
    """Factor on the time of all computation, by which a measurement differs from these rates."""

    def half_wave_s(self, precision: str) -> float:
        """Seconds in which half the device waits for the last tiles of a product."""
        return self.processors * TILE_OPERATIONS / 2 / self.rate(precision)

    def rate(self, precision: str) -> float:
        if precision in self.products:
            return self.products[precision]
        known = ", ".join(self.products)
        raise UserError(
            "precision-not-on-gpu", f"{self.name} does not support {precision}; set --train.precision to one of {known}"
        )


@dataclass(frozen=True)
class Network:
    """Links inside a machine and between machines: stated bytes per second in one direction, and seconds of a hop."""

    name: str
    inside: float
    inside_hop_s: float
    between: float
    """Of a whole machine, all its adapters together."""
    between_hop_s: float


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("bertrain.config").joinpath("devices.toml").read_text())


def gpu_names() -> list[str]:
    return list(_table()["gpu"])


def find_gpu(name: str) -> Gpu:
    """The GPU of this name in the table."""
    if name not in gpu_names():
        raise UserError("unknown-gpu", f"--gpu {name} is not a known GPU; choose one of {', '.join(gpu_names())}")
    entry, achieved = _table()["gpu"][name], _table()["achieved"]
    peak = {precision: 1e12 * tera for precision, tera in entry["peak"].items()}
    shares = {precision: achieved["products_fp8" if precision == "fp8" else "products"] for precision in peak}
    return Gpu(
        name=name,
        products={precision: shares[precision] * rate for precision, rate in peak.items()},
        attention_share=achieved["attention"] / achieved["products"],
        memory=achieved["memory"] * 1e9 * entry["bandwidth"],
        exposed_bytes=achieved["exposed_bytes"],
        launch_s=1e-6 * achieved["launch_us"],
        fill_s=1e-6 * achieved["fill_us"],
        processors=entry["processors"],
        link=1e9 * entry["link"],
        memory_bytes=int(entry["memory"] * GIB),
        inside=entry.get("inside", "nvlink"),
    )


def gpu_like(device: str) -> Gpu | None:
    """The GPU of the table that CUDA calls `device`, such as NVIDIA H100 80GB HBM3; None if there is none.

    A word that is not understood (PCIe, NVL, Laptop, MIG) names another card, with other speeds.
    """
    words = [word for word in re.split(r"[\s-]+", device.lower()) if not re.fullmatch(SAYS_NOTHING, word)]
    sizes = [word.removesuffix("gb") for word in words if re.fullmatch(r"\d+gb", word)]
    name = "-".join(word for word in words if word.removesuffix("gb") not in sizes).replace("rtx-", "rtx")
    for known in ("-".join([name, *sizes]), name):
        if known in gpu_names() and all(int(size) == _table()["gpu"][known]["memory"] for size in sizes):
            return find_gpu(known)
    return None


def find_network(text: str, gpu: Gpu, per_node: int) -> Network:
    """The network `text`: INSIDE+BETWEEN by name, adapters in front as in nvlink+4xib-hdr, or a .toml file.

    Default: the GPU's own link, ib-ndr, and an adapter for each GPU. The network's name says how many there are.
    """
    if text.endswith(".toml"):
        return _read_network(Path(text))
    inside_name, _, between_name = (text or gpu.inside).partition("+")
    adapters, _, between_name = (between_name or "ib-ndr").rpartition("x")
    inside, between = _table()["inside"].get(inside_name), _table()["between"].get(between_name)
    if inside is None or between is None or (adapters and not re.fullmatch("[1-9][0-9]{0,3}", adapters)):
        known = f"{', '.join(_table()['inside'])} inside a machine and {', '.join(_table()['between'])} between them"
        raise UserError(
            "unknown-network",
            f"--network {text} is not INSIDE+BETWEEN, such as nvlink+4xib-hdr, or a .toml file; known links: {known}",
        )
    number = int(adapters) if adapters else per_node
    link = gpu.link if between_name == "nvlink" else 1e9 * between["gb_per_s"]
    return Network(
        name=f"{inside_name}+{number}x{between_name}",
        inside=gpu.link if inside_name == gpu.inside or "gb_per_s" not in inside else 1e9 * inside["gb_per_s"],
        inside_hop_s=1e-6 * inside["hop_us"],
        between=number * link,
        between_hop_s=1e-6 * between["hop_us"],
    )


NETWORK_KEYS = {"inside_gb_per_s", "inside_hop_us", "between_gb_per_s", "between_hop_us"}


def _read_network(path: Path) -> Network:
    found = read_toml(read_text(path), str(path))
    try:
        values = check_value(found, dict.fromkeys(sorted(NETWORK_KEYS), Finite))
    except JsonError as error:
        needed = ", ".join(sorted(NETWORK_KEYS))
        raise UserError(
            "bad-network-file", f"{path} does not describe a network ({error}); it needs {needed}"
        ) from None
    if found.keys() - NETWORK_KEYS or not all(0 < value < math.inf for value in values.values()):
        raise UserError(
            "bad-network-file",
            f"{path} must have {', '.join(sorted(NETWORK_KEYS))} and nothing else, all finite and above 0",
        )
    return Network(
        path.stem,
        1e9 * values["inside_gb_per_s"],
        1e-6 * values["inside_hop_us"],
        1e9 * values["between_gb_per_s"],
        1e-6 * values["between_hop_us"],
    )


def with_ceilings(gpu: Gpu, precision: str, operations_per_s: float, bytes_per_s: float) -> Gpu:
    """`gpu` with the speed of a product and of a copy as a profile measured them."""
    achieved = _table()["achieved"]
    memory = achieved["memory"] / achieved["copy"] * bytes_per_s
    return replace(gpu, products=gpu.products | {precision: operations_per_s}, memory=memory)
