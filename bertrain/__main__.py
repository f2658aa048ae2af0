from bertrain.cli import main

main()
