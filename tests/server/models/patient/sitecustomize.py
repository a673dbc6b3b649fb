"""Python runs this at its start where this folder is in PYTHONPATH: processes of models wait for tiers."""

import sys

if any("polarlm.server.models.child" in word for word in sys.orig_argv):
    from tests.patience import be_patient

    be_patient()
