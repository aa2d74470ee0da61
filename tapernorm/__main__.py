"""python -m tapernorm PROGRAM key=value ..."""

from tapernorm.cli.command import main

if __name__ == "__main__":
    main()
