// stamp is the worker of the benchmark: its first act is to append the time to a
// file. Every launcher that is compared starts this same program.
//
//	stamp FILE once          ... and exits with 0
//	stamp FILE wait          ... and waits; SIGUSR1 makes it exit with 1
//	stamp FILE exec PROGRAM  ... and becomes PROGRAM
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

func main() {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	if len(os.Args) < 3 {
		fail("usage: stamp FILE once|wait|exec [PROGRAM...]")
	}
	failNow := make(chan os.Signal, 1)
	if os.Args[2] == "wait" {
		signal.Notify(failNow, syscall.SIGUSR1) // before the bench can read the pid
	}
	write("start", now)
	switch os.Args[2] {
	case "wait":
		<-failNow
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
		write("exit", now)
		os.Exit(1)
	case "exec":
		fail(syscall.Exec(os.Args[3], os.Args[3:], os.Environ()))
	}
}

func write(event string, at unix.Timespec) {
	f, err := os.OpenFile(os.Args[1], os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		fail(err)
	}
	// One write, so that lines of several workers do not mix.
	fmt.Fprintf(f, "%s %d %d %d %s %s\n", event, at.Nano(), os.Getpid(), os.Getppid(), os.Getenv("RANK"),
		os.Getenv("WORLD_SIZE"))
	f.Close()
}

func fail(why any) {
	fmt.Fprintln(os.Stderr, "stamp:", why)
	os.Exit(2)
}
