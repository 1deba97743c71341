# SPDX-License-Identifier: Apache-2.0
"""What tests share: oracles and simulated worlds. Imported as `support`."""
