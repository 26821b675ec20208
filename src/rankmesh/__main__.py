"""``python -m rankmesh`` is the ``rankmesh`` command."""

from rankmesh.cli import main

if __name__ == "__main__":
    main()
