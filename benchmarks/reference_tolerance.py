"""How far rounding moves a sequence's log-prob: packed rows against the sequence alone, in units of the tolerance.

    python benchmarks/reference_tolerance.py [--json FILE]

A run that compares the policy with a stored reference before its first step allows `log_prob_tolerance`
(kumi.train.check_reference). This measures the share of it that rounding uses: the log-prob of a sequence in a row
with others, computed in chunks of other sizes, against the sequence alone, in each dtype, for several lengths and
models. A share of 1 would refuse a sound run; a wrong token, mask or weight is far above it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from kumi.nn.decoder import Decoder
from kumi.nn.initialize import initialize
from kumi.objectives import IGNORED
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.train.check_reference import log_prob_tolerance

LENGTHS, LAYERS = (16, 128, 1024), (2, 16)
