package anymaster

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
)

// WorkerPort is a free port for the first worker, which will serve the store. It is one of HOST_PORTS if set, else
// one of the ports that DLRover's agents take.
func WorkerPort() (int, error) {
	ports := os.Getenv("HOST_PORTS")
	if ports == "" {
		return anyWorkerPort()
	}
	for text := range strings.SplitSeq(ports, ",") {
		if n, err := strconv.Atoi(strings.TrimSpace(text)); err == nil && free(n) {
			return n, nil
		}
	}
	return 0, fmt.Errorf("HOST_PORTS=%s: none of these ports is free", ports)
}

func anyWorkerPort() (int, error) {
	const first, last, tries = 20000, 30000, 100
	for range tries {
		if n := first + rand.IntN(last-first); free(n) {
			return n, nil
		}
	}
	return 0, fmt.Errorf("no free port from %d to %d", first, last)
}

// free reports whether a worker can bind the port, as it will, on all addresses.
func free(port int) bool {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
	if err != nil {
		return false
	}
	_ = l.Close()
	return true
}
