# SPDX-License-Identifier: Apache-2.0
"""Backends, one folder each; installed as hyper_parallel.backends and loaded by name."""
