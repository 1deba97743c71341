# SPDX-License-Identifier: Apache-2.0
"""Run pydoclint, and spare a docstring that lists neither arguments nor results.

pydoclint spares a docstring without sections, and wants all of them where there is one. Here the
signature may say the rest beside `Raises:` or `Communicates:` alone.
"""

from pydoclint.main import main
from pydoclint.utils.doc import Doc


def lists_nothing(doc: Doc) -> bool:
    """Say whether neither arguments nor results are described."""
    return not (doc.argList.infoList or doc.hasReturnsSection or doc.hasYieldsSection)


Doc.isShortDocstring = property(lists_nothing)

if __name__ == "__main__":
    main()
