"""One operation a file, told whole: mathematics, cost, cases, kernels, gradients, and the function users call."""
