"""`python -m onnxamp` runs the same commands as `onnxamp`."""

from onnxamp.cli import main

if __name__ == "__main__":
    main()
