"""scripts/check_layers.py finds each kind of violation, and none where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_layers.py"

CMAKE = """
# A comment with polyreme_module(nonsense SOURCES x.cpp) in it.
polyreme_module(base SOURCES base/a.cpp)
polyreme_module(device SOURCES device/d.cpp
                DEPENDS base)
polyreme_module(ops SOURCES ops/o.cpp DEPENDS device)
polyreme_module(mesh SOURCES mesh/m.cpp DEPENDS ops)
polyreme_module(pipeline_schedule SOURCES pipeline/schedule/s.cpp DEPENDS base)
polyreme_module(pipeline SOURCES pipeline/p.cpp DEPENDS mesh pipeline_schedule)
"""

CLEAN = {
    "csrc/CMakeLists.txt": CMAKE,
    "csrc/base/a.cpp": '#include "base/a.h"\n#include <vector>\n',
    "csrc/device/d.cpp": '#include "device/d.h"\n#include "base/a.h"\n',
    "csrc/device/cuda/c.cpp": "#include <cuda_runtime.h>\n",
    "csrc/comm_note.md": "not a source\n",
    "csrc/mesh/m.cpp": '#include "base/a.h"  // through ops and device\n',
    "csrc/pipeline/schedule/s.cpp": '#include "base/a.h"\n',
    "csrc/pipeline/p.cpp": '#include "pipeline/schedule/s.h"\n#include "mesh/m.h"\n',
    "csrc/bindings/b.cpp": '#include "pipeline/p.h"\n#include "base/a.h"\n',
    "csrc/ops/cpu/kernels/k.cpp": '#include <stdint.h>\n#include "base/philox.h"\n',
    "csrc/ops/cpu/kernels/l.cpp": '#include <immintrin.h>\n#include "ops/cpu/kernels/k.h"\n',
    "kernels/x.cu": "#include <cuda_fp16.h>\n",
    "tests/cpp/device/d_test.cpp": '#include "device/d.h"\n',
}


def run(root: Path, files: dict[str, str]) -> tuple[int, str]:
    """Exit status and output of the script for a tree of these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(root)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_clean_tree_passes(tmp_path: Path) -> None:
    assert run(tmp_path, CLEAN) == (0, "layers: ok\n")


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (
            "csrc/base/a.cpp",
            '\n#include "device/d.h"\n',
            "csrc/base/a.cpp:2: base may not include device/d.h",
        ),
        (
            "csrc/device/d.cpp",
            '  #  include "mesh/m.h"\n',
            "csrc/device/d.cpp:1: device may not include mesh/m.h",
        ),
        (
            "csrc/pipeline/schedule/s.cpp",
            '#include "mesh/m.h"\n',
            "csrc/pipeline/schedule/s.cpp:1: pipeline_schedule may not include mesh/m.h",
        ),
        ("csrc/base/a.cpp", '#include "pipeline/p.h"\n', "base may not include pipeline/p.h"),
        ("csrc/stray/s.cpp", '#include "base/a.h"\n', "csrc/stray/s.cpp:1: belongs to no module"),
        ("csrc/device/d.cpp", "#include <cuda_runtime.h>\n", "<cuda_runtime.h> belongs to a backend"),
        ("csrc/device/cuda/c.cpp", "#include <mpi.h>\n", "<mpi.h> belongs to a backend"),
        ("csrc/mesh/m.cpp", "#include <nccl.h>\n", "<nccl.h> belongs to a backend"),
        ("tests/cpp/mesh/m_test.cpp", "#include <cudnn.h>\n", "<cudnn.h> belongs to a backend"),
        ("csrc/ops/cpu/kernels/k.cpp", "#include <vector>\n", "a kernel may not include <vector>"),
        ("csrc/ops/cpu/kernels/k.cpp", '#include "base/a.h"\n', "a kernel may not include base/a.h"),
        ("kernels/k.cu", "// <<<\nk<<<1, 2>>>();\n", "kernels/k.cu:2: <<< does not run on the CPU"),
        ("csrc/base/a.cpp", "// \u00fcber\n", "csrc/base/a.cpp:1: '\u00fc' is not ASCII"),
        (
            "csrc/CMakeLists.txt",
            CMAKE + "polyreme_module(nn DEPENDS optim)\n",
            "nn depends on optim, which is no",
        ),
    ],
)
def test_violation_is_named(tmp_path: Path, path: str, text: str, message: str) -> None:
    status, output = run(tmp_path, {**CLEAN, path: text})
    assert status == 1
    assert message in output
    assert output.endswith("layers: 1 violation(s)\n")


def test_this_repository_is_clean() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
