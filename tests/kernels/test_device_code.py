"""The output of ptxas for the kernels on sm_90: no spills, tensor cores, wide asynchronous copies.

Runs without a GPU on whatever Triton is installed; `pytest -s` prints the registers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from operators import child
from operators.device_code import DeviceCode

from effuse.kernels import products_hopper

Codes = list[tuple[str, DeviceCode]]
Compiled = Callable[[str], Codes]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """By group. One process compiles all of them, because its start costs more than most groups."""
    program = child.Program("operators.compiled", "all", TRITON_INTERPRET="0")

    @cache
    def codes_of(group: str) -> Codes:
        lines = [dict(line) for line in program.line(group)["codes"]]  # type: ignore[attr-defined]
        codes = [(str(line.pop("variant")), DeviceCode(**line)) for line in lines]
        for variant, code in codes:
            print(f"{variant}: {code}")
        return codes

    with contextlib.closing(program):
        yield codes_of


@pytest.fixture
def attention(compiled: Compiled) -> Codes:
    return [pair for pair in compiled("attention") if pair[1].kernel == "_attention_kernel"]


@pytest.fixture
def hopper(compiled: Compiled) -> Codes:
    return [pair for pair in compiled("hopper") if pair[1].kernel == "hopper_attention_kernel"]


@pytest.mark.parametrize(("group", "kernels"), [("distinct", 10), ("rows", 12), ("sampling", 21)])
def test_no_spills(compiled: Compiled, group: str, kernels: int) -> None:
    codes = compiled(group)
    assert len(codes) == kernels
    assert_no_spills(codes)


def test_copies_of_pages_move_16_bytes_at_a_time_and_many_together(compiled: Compiled) -> None:
    ((_, code),) = compiled("copies")
    assert_no_spills([("dream", code)])
    assert code.count("LDG.E.128") == code.count("STG.E.128") == code.count("STG") >= 8


def test_the_distinct_layout_is_read_in_wide_copies_and_multiplied_on_wgmma(
    compiled: Compiled,
) -> None:
    """V lies by dimension there: a mask in the wrong place makes it loads of two bytes."""
    codes = [pair for pair in compiled("distinct") if "attention" in pair[1].kernel]
    assert len(codes) == 7
    for variant, code in codes:
        assert code.count("LDG.E.U16") == 0, (variant, str(code))
        assert code.count("LDGSTS.E.BYPASS.128") > 0, (variant, str(code))
        assert (code.count("HGMMA") > 0) == ("fp32" not in variant), (variant, str(code))
        assert code.programs_per_processor() >= 2, (variant, str(code))


def test_sums_move_rows_in_wide_accesses_and_poll_past_the_caches(compiled: Compiled) -> None:
    codes = compiled("peers")
    assert len(codes) == 12
    assert_no_spills(codes)
    for variant, code in codes:
        assert code.count("LDG.E.U16") == code.count("STG.E.U16") == 0, (variant, str(code))
        # A row to each peer, both results, and places that are free again.
        assert code.count("STG.E.128") >= int(variant[0]) - 1 + 2 + 1, (variant, str(code))
        assert code.count("LDG.E.128.STRONG.SYS") > 0, (variant, str(code))


def test_sums_whose_bits_are_alike_add_squares_in_one_order(compiled: Compiled) -> None:
    """The number of rows chooses whether ranks share them, and warps choose the order."""
    codes = {variant: code.num_warps for variant, code in compiled("peers")}
    assert codes["4_ranks"] != codes["4_ranks_share"], "the faster numbers differ"
    alike = {number for variant, number in codes.items() if variant.endswith("_alike")}
    assert len(alike) == 1


def test_products_of_experts_are_wide_copies_and_tensor_cores(compiled: Compiled) -> None:
    """Tiles of 64 rows by wgmma, smaller ones by the older instructions, fp32 by neither; the wide
    ones of the largest steps, which leave the second product to torch, by descriptor."""
    codes = compiled("experts")
    assert len(codes) == 29
    assert_no_spills(codes)
    products = [pair for pair in codes if pair[1].kernel in ("_gate_up_kernel", "_down_kernel")]
    wide = [pair for pair in products if pair[0] == "llada2_64"]
    assert len(wide) == 1
    for variant, code in wide:
        assert code.count("UTMALDG") > 0 and code.count("HGMMA") > 0, str(code)
        assert code.count("LDGSTS.E.BYPASS.128") > 0, (variant, str(code))
    for variant, code in [pair for pair in products if pair not in wide]:
        assert code.count("LDG.E.U16") == 0, (variant, str(code))
        assert code.count("LDGSTS.E.BYPASS.128") > 0, (variant, str(code))
        assert code.programs_per_processor() >= 2, (variant, str(code))
        assert (code.count("HGMMA") > 0) == (variant == "llada2_48"), str(code)
        assert (code.count("HMMA") > 0) == (variant in ("llada2_1", "llada2_32")), str(code)


def test_products_alike_for_all_numbers_of_rows_are_on_wgmma(compiled: Compiled) -> None:
    """Whatever the tile: another instruction would add up in another order."""
    codes = compiled("products")
    assert len(codes) == 24
    assert_no_spills(codes)
    for variant, code in codes:
        assert code.count("HGMMA") >= 4 and code.count("HMMA") == 0, (variant, str(code))
        assert code.count("UTMALDG") >= 2, (variant, str(code))


def test_products_initialise_no_barrier_that_nobody_waits_for(compiled: Compiled) -> None:
    """The compiler would give its memory to values as well, and a GPU that interrupts the kernel
    writes it back over them. A stage has two barriers; two consumers that take turns have two."""
    tiles = {f"{tile.rows}x{tile.consumers}": tile for tile in products_hopper.TILES}
    for variant, code in compiled("products"):
        tile = tiles[variant.partition(" ")[0]]
        expected = 2 * tile.stages + 2 * (tile.consumers == 1)
        assert code.count("SYNCS.EXCH") == expected, (variant, str(code))


def test_experts_alike_for_all_numbers_of_picks_are_on_wgmma(compiled: Compiled) -> None:
    products = [pair for pair in compiled("invariant_experts") if "_sort" not in pair[1].kernel]
    products = [pair for pair in products if pair[1].kernel in ("_gate_up_kernel", "_down_kernel")]
    assert len(products) == 6
    assert_no_spills(products)
    for variant, code in products:
        assert code.count("HGMMA") > 0 and code.count("HMMA") == 0, (variant, str(code))


def test_attention_does_not_spill(attention: Codes) -> None:
    assert len(attention) == 7
    assert_no_spills(attention)


def assert_no_spills(codes: Codes) -> None:
    for variant, code in codes:
        spilled = code.stack_bytes + code.count("LDL") + code.count("STL")
        assert spilled == 0, (variant, str(code))


def test_attention_in_bf16_multiplies_on_wgmma(attention: Codes) -> None:
    for variant, code in attention:
        assert (code.count("HGMMA") > 0) == ("fp32" not in variant), (variant, str(code))
        assert code.count("HMMA") == 0, (variant, str(code))


def test_attention_loads_pages_in_wide_asynchronous_copies(attention: Codes) -> None:
    for variant, code in attention:
        assert code.count("LDGSTS.E.BYPASS.128") + code.count("LDGSTS.E.BYPASS.LTC128B.128") > 0, (
            variant,
            str(code),
        )
        assert code.count("LDG.E.U16") == 0, (variant, str(code))


def test_attention_for_hopper_keeps_its_main_loops_in_registers(hopper: Codes) -> None:
    """Of two loops a warpgroup has, over masked and over whole tiles, the second never spills."""
    assert len(hopper) == 16
    for variant, code in hopper:
        steps = code.sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x0")
        loops = [step for step in steps if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in step]
        clean = [loop for loop in loops if "LDL" not in loop and "STL" not in loop]
        assert len(clean) >= len(loops) // 2 >= 1, (variant, str(code))
        assert code.stack_bytes <= 320, (variant, str(code))


def test_attention_for_hopper_multiplies_on_wgmma_and_copies_boxes(hopper: Codes) -> None:
    shares = [code.registers for variant, code in hopper if variant == "sdar_shares"]
    assert shares == [168, 128, 128], "of beginnings, of the rest, and of the rest with the merge"
    for variant, code in hopper:
        assert code.count("HGMMA") >= 36, (variant, str(code))
        assert code.count("HMMA") == 0, (variant, str(code))
        assert code.count("USETMAXREG") > 0, (variant, str(code))
        assert code.count("UTMALDG") > 0, (variant, str(code))
        # It awaits the kernel before, and allows the one after, once each. That of beginnings also
        # awaits it in programs without work, because the next kernel relies on that.
        awaits, allows = code.count("ACQBULK"), code.count("PREEXIT")
        assert allows == 1 and awaits in ((1, 2) if variant == "sdar_shares" else (1,)), str(code)
        assert code.count("LDGSTS.E.BYPASS.128") > 0, (variant, str(code))


def test_two_attention_programs_fit_a_processor(attention: Codes) -> None:
    for variant, code in attention:
        assert code.programs_per_processor() >= 2, (variant, str(code))


def test_digests_keep_to_registers_and_load_16_bytes(compiled: Compiled) -> None:
    codes = compiled("digests")
    assert len(codes) == 4
    assert_no_spills(codes)
    for variant, code in codes:
        assert code.count("LDG.E.128") > 0, (variant, str(code))
        assert code.count("LDG.E.U") + code.count("BAR.SYNC") == 0, (variant, str(code))


def test_the_kernels_of_steps_use_no_stack(compiled: Compiled) -> None:
    codes = compiled("steps")
    last = {"_gather_kernel", "_exchange_kernel"}
    for shape in ("32x8", "4x8"):
        own = [code for variant, code in codes if variant == shape]
        assert {code.kernel for code in own} == {"_plan_kernel", "_advance_kernel"} | last
        assert all(code.stack_bytes == 0 for code in own), [str(code) for code in own]
