"""Tools of the people who work on mlakit's kernels: nothing here is part of a release."""
