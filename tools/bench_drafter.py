#!/usr/bin/env python3
"""Times the draft layer alone: chains of drafts, and a prompt tile's rows; the model itself is not loaded.

    tools/bench_drafter.py MODEL [--platform=cuda] [--most=3,7] [--vocab=32768] [--kept=1,4]

`--vocab=N` scores the first N ids only, as `--draft_vocab` does with a file of N ids. `--kept` rows are those that
the window before kept. Residuals are noise and ids arbitrary: times do not depend on them.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from strata_jax.cli.devices import start_jax
from strata_jax.config import TILE_ROWS, DraftSettings
from strata_jax.weights.budget import StepSizes
from strata_jax.weights.draft_layer import find_draft_layer
from strata_jax.weights.draft_needs import draft_needs, draft_sizes
from strata_jax.weights.draft_vocab import format_draft_vocab
from strata_jax.weights.matrices import matrices_of
from strata_jax.weights.pack import Pack, open_pack

CONTEXT = 8192
REPEAT = 50


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--platform", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--most", default="3", help="drafts that chains are compiled for")
    parser.add_argument("--kept", default="1", help="rows that the window before kept")
    parser.add_argument("--vocab", default="0", help="ids that are scored; 0: all")
    return parser.parse_args()


def main() -> None:
    arguments = parse_flags()
    start_jax(arguments.platform, 4 << 30)
    with open_pack(arguments.model) as pack, tempfile.TemporaryDirectory() as folder:
        for vocab in map(int, arguments.vocab.split(",")):
            path = Path(folder) / f"{vocab}.txt"
            path.write_text(format_draft_vocab(range(vocab), "the first"))
            for most in map(int, arguments.most.split(",")):
                settings = DraftSettings(most=most, draft_vocab=path if vocab else None)
                print(f"vocabulary {vocab or 'all'}, chains of {most}:")
                measure(pack, settings, arguments)


def measure(pack: Pack, settings: DraftSettings, arguments: argparse.Namespace) -> None:
    """Prints the figures of one drafter."""
    import jax

    from strata_jax.engine.loader import Placing, primary_sharding
    from strata_jax.engine.mtp_drafter import MtpDrafter
    from strata_jax.ops.native import Backend
    from strata_jax.ops.sets import native_ops

    backend = Backend(arguments.platform)
    steps = StepSizes(tile_rows=TILE_ROWS[arguments.platform])
    needs = draft_needs(pack, settings, CONTEXT, "fp16", steps, arguments.platform)
    assert needs is not None, "a file with a draft layer expected"
    print(
        f"  weights {needs.weight_bytes >> 20} MiB, cache and residuals {needs.xla_bytes_of(steps) >> 20} MiB"
    )
    place = primary_sharding(arguments.platform)
    placing = Placing(backend=backend, sharding=place, result_sharding=place, compiler_options=None)
    draft = find_draft_layer(pack)
    assert draft is not None
    store = shared_store(pack, backend)
    sizes = draft_sizes(pack.config, settings, CONTEXT, "fp16", steps)
    began = time.perf_counter()
    shared = native_ops(store.slot, backend=backend)
    drafter = MtpDrafter.open(draft, shared, pack.config, settings, sizes, placing, lambda _: None)
    print(f"  opened in {time.perf_counter() - began:.1f} s")
    rng = np.random.default_rng(0)
    shape = pack.config.num_streams, pack.config.hidden
    tile = jax.device_put(rng.standard_normal((steps.tile_rows, *shape)).astype(np.float32), place)
    window = jax.device_put(np.asarray(tile[: steps.window_rows]), place)
    ids = rng.integers(0, pack.config.vocab_size, steps.tile_rows).astype(np.int32)
    drafter.reset()
    drafter.read(ids, tile, 0)
    drafter.draft(1)  # the tile is done

    def whole(at: int) -> None:
        drafter.read(ids, tile, at)
        drafter.draft(1)

    show("tile and a draft", whole, 0, apart=0)
    for kept in map(int, arguments.kept.split(",")):
        for count in range(1, settings.most + 1):

            def one(at: int, kept: int = kept, count: int = count) -> None:
                drafter.read(ids[:kept], window, at)
                drafter.draft(count)

            show(f"{kept} kept, {count} drafts", one, steps.tile_rows)
    drafter.close()
    store.close()


def show(name: str, run: Any, begin: int, apart: int = 8) -> None:
    """Prints the median time of a call; calls are `apart` positions from each other."""
    times = []
    for turn in range(REPEAT):
        began = time.perf_counter()
        run(begin + apart * turn)
        times.append(1e3 * (time.perf_counter() - began))
    print(f"  {name:20} median {np.median(times[5:]):.3f} ms, least {min(times):.3f}")


def shared_store(pack: Pack, backend: Any) -> Any:
    """A store of the embedding and the head alone."""
    from strata_jax.ops.roles import Role
    from strata_jax.weights.matrices import fill_store
    from strata_jax.weights.panels import matrix_bytes

    if not backend.is_device:
        return fill_store(pack)
    matrices = [m for m in matrices_of(pack) if m.role in (Role.TOKEN_EMBD, Role.OUTPUT)]
    size = sum(matrix_bytes(m.type, m.rows, m.cols) for m in matrices)
    store = backend.library.DeviceStore(len(Role), 1, 0, size, 0, 0)
    for m in matrices:
        store.put(m.role, 0, m.type, m.count, m.rows, m.cols, m.stride, m.address)
    store.publish_experts()
    return store


if __name__ == "__main__":
    main()
