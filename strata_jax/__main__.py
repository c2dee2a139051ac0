"""`python -m strata_jax` is `strata-jax`."""

import sys

from strata_jax.cli.main import run

sys.exit(run())
