"""Lets PyPI's torchvision, whose kernels are for CUDA alone, load beside a CPU build of PyTorch."""

from __future__ import annotations

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
