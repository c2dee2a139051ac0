# shellcheck shell=bash
# Shared by tools/run, tools/test, tools/check and .ci/run (sourced, not run): makes a virtual environment
# with the package built into it. Doing it again when nothing changed takes a moment.
#
#   PYTHON=/path/to/python3.12   takes that Python to make a new environment; else one is looked for
#   STRATA_CUDA=ON|OFF|AUTO      CUDA library; else AUTO where an NVIDIA device is visible, OFF elsewhere
#   STRATA_EMULATE=ON|OFF        the CUDA code for the CPU; else ON with the test extra, OFF without
#   STRATA_WERROR=ON|OFF         compiler warnings are errors; else as at the last time, OFF at first

# No build isolation: the handlers must be built with the headers of the jaxlib that will run them.
BUILD_TOOLS=(scikit-build-core pybind11 cmake ninja)

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

fail() {
  say "$1"
  exit 1
}

# Prints why $1 cannot make the environment, nothing if it can. $2 is a version such as 3.12, or empty.
python_problem() {
  "$1" - "$2" 2>/dev/null <<'PYTHON' || echo "does not run"
import importlib.util
import pathlib
import sys
import sysconfig

version = f"{sys.version_info.major}.{sys.version_info.minor}"
if version not in ("3.11", "3.12") or sys.argv[1] not in ("", version):
    print(f"is Python {version}")
elif not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
    print("has no venv and ensurepip modules (Debian: apt-get install python3-venv)")
elif not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file():
    print("has no Python.h (Debian: apt-get install python3-dev)")
PYTHON
}

# Prints a Python that can make the environment; $1 is a version such as 3.12, or empty for either.
find_python() {
  local wanted="$1" candidate problem seen=""
  local candidates=("${PYTHON:-}")
  if [[ -z "${PYTHON:-}" ]]; then
    candidates=(python3.11 python3.12 python3 python)
    candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[12].*/bin/python)
  fi
  for candidate in "${candidates[@]}"; do
    command -v "$candidate" >/dev/null || { [[ -z "${PYTHON:-}" ]] && continue; }
    problem="$(python_problem "$candidate" "$wanted")"
    if [[ -z "$problem" ]]; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
    seen+=$'\n'"  $candidate $problem"
  done
  fail "no Python ${wanted:-3.11 or 3.12} found here; install one, or name it: PYTHON=/path/to/python $0$seen"
}

# Prints what STRATA_CUDA is when nobody set it.
default_cuda() {
  if compgen -G '/dev/nvidia[0-9]*' >/dev/null || compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null; then
    echo AUTO
  else
    echo OFF
  fi
}

# Prints a number that changes with everything an installation is made from. $1 is a Python version.
fingerprint() {
  {
    pwd
    find ffi tests/native CMakeLists.txt pyproject.toml "tools/constraints-$1.txt" -type f -print0 | LC_ALL=C sort -z \
      | xargs -0 cksum
  } | cksum | tr -d ' '
}

# set_up VENV VERSION [EXTRA...]: makes VENV with a Python of VERSION (empty: either) and installs the
# package with these extras, and those it has already, in a way that follows changes of Python files.
set_up() {
  local venv="$1" version="$2"
  shift 2
  local stamp="$venv/strata-setup" has_extras="" has_werror="" has_all="" began=$SECONDS
  command -v "${CXX:-c++}" >/dev/null \
    || fail "no C++ compiler (${CXX:-c++}) found; install one (Debian: apt-get install g++), or name it: CXX=..."
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    local python
    python="$(find_python "$version")" || exit 1
    say "making $venv with $python"
    "$python" -m venv --clear "$venv"
  fi
  local has_version
  has_version="$("$venv/bin/python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')"
  [[ "$has_version" == "${version:-$has_version}" ]] \
    || fail "$venv has Python $has_version, $version expected; delete it, or name another: VENV=.venv-$version"
  version="$has_version"
  if [[ -f "$stamp" ]]; then
    { IFS= read -r has_all; read -r has_extras; read -r has_werror; } <"$stamp" || true
  fi
  local extras werror cuda emulate="${STRATA_EMULATE:-}" all
  extras="$(tr ' ' '\n' <<<"$has_extras $*" | sort -u | xargs)"
  werror="${STRATA_WERROR:-${has_werror:-OFF}}"
  cuda="${STRATA_CUDA:-$(default_cuda)}"
  # The tests run the CUDA code on the CPU, too.
  if [[ -z "$emulate" ]]; then
    [[ " $extras " == *" test "* ]] && emulate=ON || emulate=OFF
  fi
  all="$(fingerprint "$version") $extras $werror $cuda $emulate ${STRATA_CUDA_ARCHS:-} ${CXX:-}"
  if [[ "$all" == "$has_all" && -x "$venv/bin/strata-jax" ]]; then
    say "$venv is up to date (Python $version)"
    return
  fi
  rm -f "$stamp"
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
  local install=("${pip[@]}" install --quiet --constraint "tools/constraints-$version.txt")
  say "installing build tools and jaxlib into $venv (Python $version)"
  "${install[@]}" "${BUILD_TOOLS[@]}" jaxlib
  say "building and installing strata-jax${extras:+ with $extras}: CUDA $cuda, warnings as errors $werror"
  # With its bin folder first, so that the build finds the environment's CMake and Ninja.
  PATH="$PWD/$venv/bin:$PATH" STRATA_CUDA="$cuda" STRATA_WERROR="$werror" STRATA_EMULATE="$emulate" \
    "${install[@]}" --no-build-isolation --editable ".${extras:+[${extras// /,}]}"
  printf '%s\n' "$all" "$extras" "$werror" >"$stamp"
  say "$venv is ready after $((SECONDS - began)) s"
}
