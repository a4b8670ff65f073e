/* main.c - runs the command, prints its error, exits. The only place with exit. */
#include "base/err.h"
#include "base/log.h"
#include "base/process.h"
#include "cmd/cmd.h"

int main(int argc, char **argv) {
    process_prepare();
    if (argc < 2) {
        command_print_all(stderr);
        return err_exit_status(ERR_INVAL);
    }
    int rc = command_run(argc, argv);
    if (rc >= 0 && cmd_flush() < 0) rc = ERR_IO;
    if (rc >= 0) return rc;
    if (cmd_reader_closed()) return err_exit_status(rc); /* `| head` has seen enough */
    log_error("%s", err_msg());
    log_debug("%s: %s", err_name(rc), err_trace());
    return err_exit_status(rc);
}
