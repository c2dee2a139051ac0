"""What tiers leave in files; an answer never depends on whether that can be written."""

import json

import numpy as np
import pytest

from strata_jax.engine import tier_files
from strata_jax.engine.tier_files import TierFiles
from strata_jax.errors import StrataError
from strata_jax.weights.profile import Profile
from strata_jax.weights.routing import RoutedModel

MODEL = RoutedModel("abc", 2, 4)


class FakeExperts:
    """Expert 1:2 is on a device, 0:3 was used; every step routes one row."""

    def __init__(self):
        self.is_recording = False

    def tiers(self) -> np.ndarray:
        return np.asarray([[3, 3, 3, 3], [3, 3, 1, 3]], np.uint8)

    def usage(self) -> np.ndarray:
        return np.asarray([[0, 0, 0, 5], [0, 0, 0, 0]])

    def record_routing(self, on: bool) -> None:
        self.is_recording = on

    def take_routing(self) -> list[tuple[int, np.ndarray]]:
        return [(0, np.asarray([[3]]))] if self.is_recording else []


def files_for(path, prior=(), experts=None):
    return TierFiles(experts or FakeExperts(), MODEL, path, prior)  # type: ignore[arg-type]


def test_saves_what_was_learned_before_the_order_it_began_with(tmp_path):
    files = files_for(tmp_path / "p", prior=((0, 0), (1, 2)))
    files.after_step()

    files.close()

    assert Profile.load(tmp_path / "p").ranked == ((1, 2), (0, 3), (0, 0))


def test_leaves_what_is_there_where_nothing_was_learned(tmp_path):
    """As where an engine was opened for nothing, or did not open."""
    (tmp_path / "p").write_text("a ranking")

    files_for(tmp_path / "p").close()

    assert (tmp_path / "p").read_text() == "a ranking"


def test_a_profile_that_cannot_be_saved_is_told_once_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_files, "SAVE_EVERY_S", 0.0)
    path = tmp_path / "folder" / "p"
    files = files_for(path)

    files.after_step()
    files.after_step()

    assert len(files.take_warnings()) == 1
    assert files.take_warnings() == []
    with pytest.raises(StrataError, match=r"^--expert_profile_save=.*No such file"):
        files.close()
    path.parent.mkdir()
    files.close()
    assert path.exists()


@pytest.mark.parametrize("steps", [1, 2000])
def test_routing_that_cannot_be_written_ends_no_answer(steps):
    """A disk is full at once, or when what was kept in memory goes there."""
    experts = FakeExperts()
    files = files_for(None, experts=experts)
    files.write_routing(tier_files.Path("/dev/full"))

    for _ in range(steps):
        files.after_step()

    assert experts.is_recording == (steps == 1)
    with pytest.raises(StrataError, match=r"^--routing_out=/dev/full: .*No space left"):
        files.close()


def test_the_profile_is_saved_although_routing_cannot_be_written(tmp_path):
    files = files_for(tmp_path / "p")
    files.write_routing(tier_files.Path("/dev/full"))
    files.after_step()

    with pytest.raises(StrataError, match="No space left"):
        files.close()

    assert json.loads((tmp_path / "p").read_text())["ranked"]
