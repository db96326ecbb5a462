// Package ras asks NCCL's RAS subsystem (reliability, availability, serviceability) about the state of a job. From
// 2.24 on NCCL has a thread for it in every process of a job; one per node answers clients, about all nodes. It
// reports communicators, processes that do not answer, and ranks with different counts of collectives. See
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html.
package ras

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/text"
)

// defaultAddress is where NCCL listens.
const defaultAddress = "localhost:28028"

// Bounds of an answer, in bytes.
const (
	maxRead = 4 << 20
	maxText = 16 << 10
	maxHead = 4 << 10
)

// errNone means that no process listens: no NCCL, an old one, or its workers have ended.
var errNone = errors.New("ras: nobody listens")

// Address is where workers with the variables of user listen, or "" when they have switched it off.
func Address(user func(name string) (value string, ok bool)) string {
	if v, _ := user("NCCL_RAS_ENABLE"); v == "0" {
		return ""
	}
	addr, _ := user("NCCL_RAS_ADDR")
	return cmp.Or(addr, defaultAddress)
}

// Query returns the verbose status of the job of the RAS that listens at addr, as text for people. Where several jobs
// share a node, it may be another one's: the text names processes. Of more than 16 KiB it has the beginning, with the
// summary, and the end, with errors and warnings. A status that ctx cuts off is returned with an error.
//
// It takes 15 seconds at most. NCCL collects from all nodes for as long as the request allows, which is a second less
// than ctx has, 1 to 10 seconds.
func Query(ctx context.Context, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	nc, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "", errNone
	}
	if err != nil {
		return "", fmt.Errorf("ras: %w", err)
	}
	defer nc.Close()
	defer context.AfterFunc(ctx, func() { _ = nc.SetDeadline(time.Now()) })()
	if _, err := fmt.Fprintf(nc, "TIMEOUT %d\nVERBOSE STATUS\n", seconds(ctx)); err != nil {
		return "", fmt.Errorf("ras: %w", err)
	}
	answer, err := io.ReadAll(io.LimitReader(nc, maxRead)) // it closes the connection after the status
	if err != nil {
		err = fmt.Errorf("ras: the status of %s is cut off after %d bytes: %w", addr, len(answer), err)
	}
	return shown(answer), err
}

func seconds(ctx context.Context) int {
	const most = 10
	end, _ := ctx.Deadline()
	return min(max(int((time.Until(end)-time.Second)/time.Second), 1), most)
}

// shown removes the answer to TIMEOUT, and the middle of a text that is too long.
func shown(answer []byte) string {
	s := strings.TrimPrefix(strings.ToValidUTF8(string(answer), "?"), "OK\n")
	if len(s) <= maxText {
		return s
	}
	head, tail := s[:maxHead], s[len(s)-(maxText-maxHead):]
	left := fmt.Sprintf("\n[%d bytes left out]\n", len(s)-maxText)
	return text.Clip(head, maxHead) + left + text.Clip(tail, maxText)
}
