"""`python -m cllm.testing`: the scripted server, and its workers."""

import sys

from cllm.testing.serve import main

sys.exit(main(sys.argv[1:]))
