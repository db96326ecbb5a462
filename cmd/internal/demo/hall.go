package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// hall is where the machines of the demo stand: network namespaces on one switch, or all of them this machine.
type hall struct {
	prefix string // of the namespaces' names; "": there are none
}

const (
	hubAddr  = "10.98.8.254" // of the switch, where the daemon is
	fullRate = "100mbit"
	slowRate = "40mbit"
)

func (h hall) inSpaces() bool     { return h.prefix != "" }
func (h hall) hub() string        { return h.prefix + "hub" }
func (h hall) space(n int) string { return fmt.Sprint(h.prefix, n) }

// possible says why there can be no namespaces; nil: there can.
func possible() error {
	if os.Geteuid() != 0 {
		return errors.New("only root makes network namespaces")
	}
	for _, tool := range []string{"ip", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return err
		}
	}
	return nil
}

// build makes the namespaces. After an error there may be some.
func (h hall) build() error {
	lines := []string{
		"ip netns add HUB", "ip -n HUB link set lo up", "ip -n HUB link add name switch0 type bridge",
		"ip -n HUB addr add " + hubAddr + "/24 dev switch0", "ip -n HUB link set switch0 up",
	}
	for i := range machineCount {
		n := i + 1
		one := strings.NewReplacer("SPACE", h.space(n), "PLUG", fmt.Sprint("p", n), "ADDR", fmt.Sprintf("10.98.8.%d/24", n))
		for _, line := range []string{
			"ip netns add SPACE", "ip link add eth0 netns SPACE type veth peer name PLUG netns HUB",
			"ip -n HUB link set PLUG master switch0 up", "ip -n SPACE addr add ADDR dev eth0",
			"ip -n SPACE link set eth0 up", "ip -n SPACE link set lo up",
			"tc -n HUB qdisc replace dev PLUG root tbf rate " + fullRate + " burst 256kb latency 20ms",
		} {
			lines = append(lines, one.Replace(line))
		}
	}
	for _, line := range lines {
		if err := tool(strings.ReplaceAll(line, "HUB", h.hub())); err != nil {
			return err
		}
	}
	for i := range machineCount {
		if err := h.rate(i+1, fullRate); err != nil {
			return err
		}
	}
	return nil
}

// rate limits what a machine sends.
func (h hall) rate(n int, rate string) error {
	return tool(fmt.Sprintf("tc -n %s qdisc replace dev eth0 root tbf rate %s burst 256kb latency 20ms", h.space(n), rate))
}

func tool(line string) error {
	words := strings.Fields(line)
	if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

// remove removes the namespaces that are there.
func (h hall) remove() {
	names := []string{h.hub()}
	for i := range machineCount {
		names = append(names, h.space(i+1))
	}
	for _, name := range names {
		_ = exec.Command("ip", "netns", "del", name).Run() // it may not be there
	}
}

// enter runs this program once more, in the namespace of the switch, and ends it when ctx does.
func (h hall) enter(ctx context.Context, bin string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command("ip", "netns", "exec", h.hub(), self, "--feedback", "--bin="+bin, "--hall="+h.prefix)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err = <-done:
		if err != nil {
			return errors.New("what is said above")
		}
		return nil
	case <-ctx.Done():
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may be ending
		<-done
		return context.Cause(ctx)
	}
}
