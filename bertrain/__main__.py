import sys


def main() -> None:
    try:
        from bertrain.cli.main import main as run
    except KeyboardInterrupt:  # before the command line can handle it
        print("bertrain: interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
