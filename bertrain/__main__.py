import sys


def main() -> None:
    try:
        import signal

        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # preload.py blocks it while it restarts us
        from bertrain.cli.main import main as run
    except KeyboardInterrupt:  # before the command line can handle it
        print("bertrain: interrupted; nothing was written", file=sys.stderr)
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
