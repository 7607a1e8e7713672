"""The small trained model that ships, with the texts that calibrate and evaluate it (benchmarks/train_embedded.py)."""

from pathlib import Path

EMBEDDED = Path(__file__).parent / "gpt2-stdlib"
CALIBRATION_TEXT = EMBEDDED / "calibration.txt"
EVALUATION_TEXT = EMBEDDED / "evaluation.txt"
