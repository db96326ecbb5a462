package main

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// fabric are network namespaces on a bridge, as machines on a switch. It takes root.
type fabric struct {
	bridge string
	spaces []string
}

// address is that of a machine on the bridge, and with thisMachine that of this one. Another demo has other ones.
func address(machine int) string { return fmt.Sprintf("10.98.%d.%d", os.Getpid()%256, 1+machine) }

const thisMachine = 253

// build makes the machines, whose cables carry 100 Mbit/s; that of the last one sends a fifth of it.
func (f *fabric) build(machines int) error {
	name := fmt.Sprintf("dlui%d", os.Getpid())
	if err := tool("link add name %s type bridge", name); err != nil {
		return err
	}
	f.bridge = name
	if err := tool("addr add %s/24 dev %s", address(thisMachine), name); err != nil {
		return err
	}
	for i := range machines {
		rate := 100
		if i == machines-1 {
			rate /= 5
		}
		if err := f.plug(fmt.Sprintf("%s-%d", name, i), address(i), rate); err != nil {
			return err
		}
	}
	return tool("link set %s up", name)
}

// plug makes a machine with a rate in Mbit/s.
func (f *fabric) plug(space, addr string, rate int) error {
	if err := tool("netns add %s", space); err != nil {
		return err
	}
	f.spaces = append(f.spaces, space)
	port := "p" + space
	for _, args := range []string{
		fmt.Sprintf("link add eth0 netns %s type veth peer name %s", space, port),
		fmt.Sprintf("link set %s master %s up", port, f.bridge),
		fmt.Sprintf("-n %s addr add %s/24 dev eth0", space, addr),
		fmt.Sprintf("-n %s link set lo up", space),
		fmt.Sprintf("-n %s link set eth0 up", space),
		fmt.Sprintf("netns exec %s tc qdisc replace dev eth0 root tbf rate %dmbit burst 256kb latency 20ms", space, rate),
	} {
		if err := tool("%s", args); err != nil {
			return err
		}
	}
	return nil
}

// remove is for machines whose processes have ended.
func (f *fabric) remove() {
	for _, space := range f.spaces {
		_ = tool("netns del %s", space) // and its cable
	}
	if f.bridge != "" {
		_ = tool("link del %s", f.bridge)
	}
	*f = fabric{}
}

// tool calls ip(8).
func tool(format string, args ...any) error {
	command := strings.Fields(fmt.Sprintf(format, args...))
	if out, err := exec.Command("ip", command...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(command, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}
