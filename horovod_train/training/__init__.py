"""One run: run.py in order, build.py its parts, loop.py the steps, hooks and actions between them, step.py one step."""
