# Every target calls what go.py and CI call.
PYTHON ?= python3

.PHONY: check test bench golden demo
check:
	$(PYTHON) go.py check
test:
	$(PYTHON) go.py test
bench:
	$(PYTHON) go.py bench
golden:
	HEADWAY_WRITE_GOLDEN=1 $(PYTHON) go.py test tests/test_docs.py tests/test_ratchet.py tests/test_examples_run.py tests/test_terminal.py tests/test_golden.py
demo:
	$(PYTHON) go.py demo
