"""Shared by engines: a folder with a model's configuration, a default dtype, a log, quantisation."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

__all__ = ["Quantised", "default_dtype", "model_folder", "quiet"]


@contextmanager
def model_folder(config: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """Yield a folder with a ``config.json``, from which an engine constructs a model."""
    data = {**config, "architectures": config.get("architectures") or [architecture]}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(data), encoding="utf-8")
        yield folder


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Construct parameters of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the engine's logging inside this block."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


class Quantised:
    """Asks a configuration which layers it quantises, and leaves all as they are, so that a plain checkpoint loads.

    vLLM and SGLang ask one object for the method of each layer: this is a base beside their ``QuantizationConfig``.
    """

    UNQUANTISED: ClassVar[tuple[type, ...]] = ()
    packed_modules_mapping: dict[str, list[str]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config
        self._found: list[tuple[torch.nn.Module, str]] = []

    def plain(self, layer: torch.nn.Module) -> Any:
        """Return the engine's plain method of a layer, one of ``UNQUANTISED``; None where it needs none."""
        raise NotImplementedError

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return the plain method of a layer; whether the configuration has another one is kept for `kernels`."""
        self._config.packed_modules_mapping = self.packed_modules_mapping
        plain = self.plain(layer)
        try:
            method = self._config.get_quant_method(layer, prefix)
        except Exception:  # noqa: BLE001  - no kernel for this machine, so it quantises the layer
            self._found.append((layer, self._config.get_name()))
            return plain
        if method is not None and not isinstance(method, self.UNQUANTISED):
            self._found.append((layer, f"{self._config.get_name()} ({type(method).__name__})"))
        return plain

    def kernels(self, model: torch.nn.Module) -> dict[str, str]:
        """Return the parameters of the layers that it quantises in a model, with their format."""
        names = {id(module): name for name, module in model.named_modules()}
        return {
            f"{names[id(layer)]}.{parameter}": kind
            for layer, kind in self._found
            if id(layer) in names
            for parameter, _ in layer.named_parameters()
        }

    def get_name(self) -> Any:
        """Return the engine's name of it."""
        return "unquantised"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return every dtype that a plain layer can have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: no device is needed."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no files beside ``config.json``."""
        return []
