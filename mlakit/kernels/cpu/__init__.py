"""Every topic in vectorised torch, for tensors in host memory."""
