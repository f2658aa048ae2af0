from bertrain.cli.main import main

main()
