# SPDX-License-Identifier: Apache-2.0
"""Tools that explain: what a move costs, who holds what, which collectives a model issues."""
