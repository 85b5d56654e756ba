/* main.c - entry of the program `attnloom`; cli.c holds the rest, so that tests can call it. */
#include "cli.h"

int main(int argc, char **argv) { return loom__cli_main(argc, argv); }
