"""Calls whose kernels take tensor descriptors, launched again: what Triton's launchers get, and when."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from replays import profiled
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from linalg_dsl.ops.described import EncodedTile, bare_launch
from linalg_dsl.ops.replay import CompiledLaunch, OrdinaryLaunch, Recorder, Replay

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 4, 8], "fp4_padded": False}


class Driver(ModuleType):
    """What a version of Triton has in its driver's module, with a launcher that records."""

    def __init__(self, newer: bool, metadata: Any = META) -> None:
        super().__init__(f"fake_driver_{newer}")
        self.newer = newer
        self.encoded: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        sys.modules[self.__name__] = self
        self.make_tensordesc_arg = self._expanded
        self.metadata = metadata
        self.Launcher = type("CudaLauncher", (), {"__module__": self.__name__, "__call__": _call(newer)})

    def _expanded(self, arg: Any, metadata: Any) -> list[Any]:
        if metadata is None:
            return [arg.base, *arg.shape, *arg.strides, arg.padding == "nan", *arg.shape, *arg.strides]
        if self.newer:
            assert arg.round_f32_to_tf32 is False
        assert metadata is META
        self.encoded.append((arg.base.data_ptr(), tuple(arg.shape), tuple(arg.strides)))
        return [("map", arg.base.data_ptr()), *arg.shape, *arg.strides]

    def compiled(self, count: int, places: tuple[int, ...]) -> Any:
        """A compiled kernel as the version has it, its launcher wrapped as the version wraps it."""
        run = self.Launcher()
        run.launch = _wrapped(self.newer, self, [self.metadata] * count, set(places))
        run.annotations = "annotations"
        return SimpleNamespace(run=run, function=77, packed_metadata=(4, 1, 0))


def _call(newer: bool) -> Any:
    def older_call(self: Any, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, False, False, None, None, *args)

    def newer_call(
        self: Any, x: int, y: int, z: int, stream: int, function: Any, meta: Any, launch: Any, enter: Any,
        leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        self.launch(
            x, y, z, stream, function, False, False, meta, launch, enter, leave, None, None,
            self.annotations, "signature", args,
        )  # fmt: skip

    return newer_call if newer else older_call


def _wrapped(newer: bool, driver: Any, tensordesc_meta: list[Any], tensordesc_indices: set[int]) -> Any:
    """As ``wrap_handle_tensordesc`` of Triton 3.6 and 3.7 does."""

    def launcher(*args: Any) -> None:
        driver.launched.append(tuple(args))

    def older(*args: Any) -> None:
        final = list(args[:13])
        number = 0
        for i, x in enumerate(args[13:]):
            if i in tensordesc_indices:
                final.extend(driver.make_tensordesc_arg(x, tensordesc_meta[number]))
                number += 1
            else:
                final.append(x)
        launcher(*final)

    def inner(*args: Any) -> None:
        final: list[Any] = []
        number = 0
        for i, x in enumerate(args[-1]):
            if i in tensordesc_indices:
                final.extend(driver.make_tensordesc_arg(x, tensordesc_meta[number]))
                number += 1
            else:
                final.append(x)
        launcher(*args[:-1], final)

    return inner if newer else older


class Kernel:
    """A jit function that launches once through Triton's own way, and gives its compiled kernel."""

    arg_names = ("p_x", "p_o", "scale", "tile_x", "tile_o", "H", "C", "TMA")

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.slow: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, num_warps: int, num_stages: int, **constants: Any) -> Any:
            self.slow.append(args)
            return self.driver.compiled(2, (3, 4))

        return start


def tile(x: Tensor) -> TensorDescriptor:
    return TensorDescriptor(x, [2, 3, 5, 8], [120, 8, 24, 1], [1, 1, 4, 8])


def recorded(driver: Driver) -> tuple[Kernel, Replay]:
    kernel = Kernel(driver)
    x = torch.zeros(2, 5, 3, 8)
    with Recorder({id(x): (0, 0)}, 1) as recorder:
        between = torch.empty(2, 5, 3, 8)
        o = torch.empty(2, 5, 3, 8)
        arguments = (x, o, 0.5, tile(x), tile(between), 3)
        recorder.launch(kernel, 6, arguments, {"TMA": True, "C": 4}, 4, 3)
    made = recorder.replay((o,), x)
    assert made is not None
    return kernel, made


@pytest.mark.parametrize("newer", [False, True])
def test_a_launch_gets_what_was_encoded_for_its_addresses(newer: bool) -> None:
    driver = Driver(newer)
    kernel, made = recorded(driver)
    assert isinstance(made.launches[0], CompiledLaunch)
    a, b = torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 8)
    sizes = (2, 3, 5, 8, 120, 8, 24, 1)
    for x in (a, b, a):
        (o,) = made([x], [x.data_ptr()])
        found = driver.launched[-1]
        if newer:
            assert found[:-1] == (
                6, 1, 1, 0, 77, False, False, (4, 1, 0), None, None, None, None, None,
                "annotations", "signature",
            )  # fmt: skip
            arguments = tuple(found[-1])
        else:
            assert found[:13] == (6, 1, 1, 0, 77, False, False, None, None, (4, 1, 0), None, None, None)
            arguments = found[13:]
        assert arguments[:5] == (x.data_ptr(), o.data_ptr(), 0.5, ("map", x.data_ptr()), *sizes[:1])
        assert arguments[4:12] == sizes
        assert arguments[12][0] == "map"
        assert arguments[13:] == (*sizes, 3, 4, True)
    assert len(driver.launched) == 3
    addresses = [address for address, *_ in driver.encoded]
    assert addresses.count(a.data_ptr()) == addresses.count(b.data_ptr()) == 1  # once for each address
    assert {tuple(rest) for _, *rest in driver.encoded} == {((2, 3, 5, 8), (120, 8, 24, 1))}
    assert len(kernel.slow) == 1


@pytest.mark.parametrize("newer", [False, True])
def test_the_argument_between_kernels_is_where_its_buffer_is(newer: bool) -> None:
    driver = Driver(newer)
    _, made = recorded(driver)
    x = torch.zeros(2, 5, 3, 8)
    (o,) = made([x], [x.data_ptr()])
    found = driver.launched[-1][-1] if newer else driver.launched[-1][13:]
    other = found[12][1]
    assert other not in (x.data_ptr(), o.data_ptr())
    assert other % 16 == 0


def test_a_profiler_gets_launches_with_descriptors_of_the_call() -> None:
    driver = Driver(True)
    kernel, made = recorded(driver)
    x = torch.zeros(2, 5, 3, 8)

    with profiled():
        made([x], [x.data_ptr()])
    assert not driver.launched
    given = kernel.slow[-1]
    assert given[3].base.data_ptr() == x.data_ptr()
    assert (given[3].shape, given[3].strides, given[3].block_shape) == (
        [2, 3, 5, 8], [120, 8, 24, 1], [1, 1, 4, 8],
    )  # fmt: skip
    assert given[4].base.shape == (2, 5, 3, 8)


@pytest.mark.parametrize("newer", [False, True])
def test_descriptors_that_are_pointers_to_the_kernel_are_launched_by_triton(newer: bool) -> None:
    """Where the target has no such copies Triton hands over pointers, shapes and strides."""
    driver = Driver(newer, metadata=None)
    _, made = recorded(driver)
    assert isinstance(made.launches[0], OrdinaryLaunch)


def test_launchers_that_are_unlike_those_known_launch_by_themselves() -> None:
    driver = Driver(True)
    compiled = driver.compiled(1, (0,))
    arguments = [tile(torch.zeros(2, 5, 3, 8))]
    assert bare_launch(compiled, arguments) is not None
    compiled.run.launch = SimpleNamespace()
    assert bare_launch(compiled, arguments) is None
    compiled = driver.compiled(2, (0,))  # two are known of, one is given
    assert bare_launch(compiled, arguments) is None
    del driver.make_tensordesc_arg
    assert bare_launch(driver.compiled(1, (0,)), arguments) is None


def test_a_recording_keeps_no_tensor_alive() -> None:
    driver = Driver(True)
    kernel = Kernel(driver)
    x = torch.zeros(2, 5, 3, 8)
    seen = weakref.ref(x)
    recorder = Recorder({id(x): (0, 0)}, 1)
    with recorder:
        o = torch.empty(2, 5, 3, 8)
        recorder.launch(kernel, 6, (x, o, 0.5, tile(x), tile(o), 3), {"TMA": True, "C": 4}, 4, 3)
    made = recorder.replay((o,), x)
    kernel.slow.clear()
    del x, o, recorder
    gc.collect()
    assert made is not None
    assert seen() is None


def test_encoded_forms_do_not_pile_up() -> None:
    made: list[int] = []

    def encode(address: int) -> int:
        made.append(address)
        return address

    tile = EncodedTile(encode)
    for address in (1, 2, 1, 2):
        assert tile.at(address) == address
    assert made == [1, 2]
    for address in range(1000):
        tile.at(address)
    assert len(tile.kept) <= 64


def test_the_installed_version_is_one_of_those_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launcher class and wrapper, with a recording function in place of the device's."""
    import triton
    from triton.backends.nvidia import driver as real

    calls: list[tuple[Any, ...]] = []
    fills: list[tuple[Any, ...]] = []

    def launch(*args: Any) -> None:
        calls.append(args)

    def fill(*args: Any) -> Any:
        fills.append(args)
        return ("map", args[0])

    utils = SimpleNamespace(launch=launch, fill_tma_descriptor_tiled=fill, fill_tma_descriptor=fill)
    active = SimpleNamespace(utils=utils)
    monkeypatch.setattr(triton.runtime.driver, "_active", active, raising=False)
    monkeypatch.setattr(type(triton.runtime.driver), "active", active, raising=False)
    signature = {0: "*bf16", 1: "tensordesc<bf16[1, 1, 4, 8]>", 2: "i32"}
    run = object.__new__(real.CudaLauncher)
    run.launch = real.wrap_handle_tensordesc(launch, signature, [META])
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    run.launch_cooperative_grid = run.launch_pdl = False
    run.arg_annotations = run.kernel_signature = None
    x = torch.zeros(2, 5, 3, 8)
    compiled = SimpleNamespace(run=run)
    bare = bare_launch(compiled, [x, tile(x), 3])
    assert bare is not None
    assert bare.place == (0, 1, 10)
    run(6, 1, 1, 0, 77, (4, 1, 0), None, None, None, x, tile(x), 3)
    arguments = list(bare.arguments)
    (place,) = bare.tiles
    arguments[place] = bare.tiles[place].at(x.data_ptr())
    bare.run(6, 1, 1, 0, 77, (4, 1, 0), None, None, None, *arguments)
    mine, theirs = (_flat(args) for args in reversed(calls))
    assert mine == theirs
    assert fills[0] == fills[1]
    assert run.launch is not launch  # Triton's own is as it was


def _flat(args: tuple[Any, ...]) -> list[Any]:
    out: list[Any] = []
    for x in args:
        out += x if isinstance(x, (list, tuple)) and len(x) > 4 else [x]
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in out]
