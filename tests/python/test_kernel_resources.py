"""scripts/kernel_resources.py: what it reads from reports of ptxas, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/kernel_resources.py"

ENTRY = """ptxas info    : Compiling entry function '_Z4copyPf' for '{architecture}'
ptxas info    : Function properties for _Z4copyPf
    8 bytes stack frame, {spill} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 2048 bytes smem
"""


def run(folder: Path, architectures: list[str], spill: int) -> subprocess.CompletedProcess[str]:
    kernels, build = folder / "kernels", folder / "build"
    kernels.mkdir()
    build.mkdir()
    (kernels / "copy.cu").write_text("")
    report = "".join(ENTRY.format(architecture=name, spill=spill) for name in architectures)
    (build / "copy.cu.o.ptxas").write_text(
        report.replace("4 bytes spill loads", f"{spill} bytes spill loads")
    )
    command = [sys.executable, str(SCRIPT), str(build), "--kernels", str(kernels)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_kernel_without_spills_passes(tmp_path: Path) -> None:
    result = run(tmp_path, ["sm_80", "sm_90", "sm_100"], 0)
    assert result.returncode == 0, result.stdout
    assert "42     42     42" in result.stdout
    assert "2048" in result.stdout
    assert "copy: copy" in result.stdout


def test_spills_fail(tmp_path: Path) -> None:
    result = run(tmp_path, ["sm_80", "sm_90", "sm_100"], 16)
    assert result.returncode == 1
    assert "copy: copy: spills 32 bytes" in result.stdout


def test_a_missing_architecture_or_report_fails(tmp_path: Path) -> None:
    result = run(tmp_path, ["sm_80", "sm_90"], 0)
    assert result.returncode == 1
    assert "not compiled for sm_100" in result.stdout
    (tmp_path / "kernels/other.cu").write_text("")
    command = [sys.executable, str(SCRIPT), str(tmp_path / "build"), "--kernels", str(tmp_path / "kernels")]
    assert (
        "other.cu: no report" in subprocess.run(command, capture_output=True, text=True, check=False).stdout
    )
