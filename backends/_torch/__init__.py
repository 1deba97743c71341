# SPDX-License-Identifier: Apache-2.0
"""What the backends on torch share: local operations, collectives, process groups and meshes."""
